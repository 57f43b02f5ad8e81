import numpy as np
import pytest

from shared.batch.block import Block, Ragged, RowKey
from shared.batch.store import BatchStore
from shared.rpc.errors import NotFound, ResourceExhausted
from tests.fakes.blocks import samples, scores


def of_size(count: int) -> Block:
    return Block((RowKey("p", 0),), {"x": Ragged.from_rows([np.zeros(count)], "uint8")})


def test_put_and_get():
    store = BatchStore(1 << 20, "host:1")
    block = samples(4)
    ref = store.put(block, run="r", step=3, tokens=[5, 6, 7, 8])
    assert store.get(ref.block) is block
    assert (ref.endpoint, ref.bytes, ref.digest) == ("host:1", block.nbytes, block.digest())
    assert list(ref.tokens) == [5, 6, 7, 8]
    assert [column.name for column in ref.columns] == list(block.columns)


def test_bounded_and_the_message_has_the_sizes():
    block = of_size(1000)
    store = BatchStore(2 * block.nbytes)
    store.put(block, run="r", step=1, tokens=[1])
    store.put(block, run="r", step=2, tokens=[1])
    with pytest.raises(ResourceExhausted) as refused:
        store.put(of_size(100), run="r", step=3, tokens=[1])
    message = str(refused.value)
    assert str(of_size(100).nbytes) in message
    assert f"{2 * block.nbytes} of {2 * block.nbytes}" in message
    assert store.held_bytes == 2 * block.nbytes
    store.release("r", 1)
    store.put(of_size(100), run="r", step=3, tokens=[1])


def test_release_frees_steps_up_to_and_including():
    store = BatchStore(1 << 20)
    refs = {
        (run, step): store.put(of_size(100), run=run, step=step, tokens=[1]) for run in ("a", "b") for step in (1, 2, 3)
    }
    assert store.release("a", 2) == 2 * of_size(100).nbytes
    for (run, step), ref in refs.items():
        if run == "a" and step <= 2:
            with pytest.raises(NotFound, match=ref.block):
                store.get(ref.block)
        else:
            store.get(ref.block)
    assert store.release("a", 2) == 0
    assert store.release("a", None) == of_size(100).nbytes
    assert store.release("b", None) == 3 * of_size(100).nbytes
    assert store.held_bytes == 0


def test_a_restarted_process_does_not_answer_for_its_former_self():
    old = BatchStore(1 << 20, "host:1").put(of_size(1), run="r", step=1, tokens=[1])
    new = BatchStore(1 << 20, "host:1")
    new.put(of_size(2), run="r", step=1, tokens=[1])
    with pytest.raises(NotFound, match="host:1"):
        new.get(old.block)


def test_token_counts_must_fit_the_rows():
    with pytest.raises(ValueError, match="2 token counts for 4 rows"):
        BatchStore(1 << 20).put(scores(samples(4).rows), run="r", step=1, tokens=[1, 2])
