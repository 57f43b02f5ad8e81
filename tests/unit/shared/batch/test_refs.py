import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.batch import refs
from shared.batch.block import Block, RowKey
from shared.batch.store import BatchStore
from shared.gen.sextet.v1 import batch_pb2
from shared.rpc.errors import InvalidArgument
from tests.fakes.blocks import samples, scores


def put(block: Block, tokens: list[int] | None = None, store: BatchStore | None = None) -> batch_pb2.BlockRef:
    store = store or BatchStore(1 << 30, "host:1")
    return store.put(block, run="r", step=1, tokens=tokens or [1] * len(block))


def keys(count: int, per_prompt: int = 1) -> list[RowKey]:
    return [RowKey(f"p{i // per_prompt}", i % per_prompt) for i in range(count)]


def test_merge_keeps_the_order_of_the_first_block():
    block = samples(4)
    other = scores(tuple(reversed(block.rows)))
    merged = refs.merge(put(block), put(other))
    assert refs.row_keys(merged) == list(block.rows)
    assert refs.column_names(merged) == [*block.columns, "score"]


def test_merging_a_batch_with_itself_changes_nothing():
    merged = refs.merge(put(samples(4)), put(scores(samples(4).rows)))
    assert refs.merge(merged, merged) == merged


def test_a_column_of_a_row_from_two_blocks_is_refused():
    rows = samples(4).rows
    with pytest.raises(InvalidArgument, match=r"column 'score' of row 1:0:0#0 comes from two blocks"):
        refs.merge(put(scores(rows)), put(scores(rows)))


def test_the_same_column_for_other_rows_is_a_longer_batch():
    rows = samples(4).rows
    merged = refs.merge(put(scores(rows[:2])), put(scores(rows[2:])))
    assert refs.row_keys(merged) == list(rows)


def test_slices_of_one_block_merge_back():
    ref = put(samples(4))
    rows = refs.row_keys(ref)
    merged = refs.merge(refs.select_rows(ref, rows[:1]), refs.select_rows(ref, rows[1:]))
    assert refs.row_keys(merged) == rows


def test_select_rows_orders_each_block_and_takes_the_tokens_along():
    rows = keys(3)
    merged = refs.merge(put(scores(tuple(rows)), [10, 20, 30]), put(scores((rows[2],), "score/b"), [5]))
    picked = refs.select_rows(merged, [rows[2], rows[0]])
    assert [list(block.tokens) for block in picked.blocks] == [[30, 10], [5]]
    assert refs.row_keys(picked) == [rows[2], rows[0]]
    assert len(refs.select_rows(merged, [rows[0]]).blocks) == 1


def test_select_names_what_is_missing_or_doubled():
    ref = put(scores(tuple(keys(2))))
    with pytest.raises(InvalidArgument, match="no rows p7#0"):
        refs.select_rows(ref, [RowKey("p7", 0)])
    with pytest.raises(InvalidArgument, match="twice: p0#0"):
        refs.select_rows(ref, [RowKey("p0", 0)] * 2)


def test_many_missing_rows_are_counted_and_not_all_listed():
    with pytest.raises(InvalidArgument, match="and 95 more"):
        refs.select_rows(put(scores(())), keys(100))


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(1, 6), st.booleans())
def test_split_is_a_partition_and_balanced(tokens, parts, keep_prompts):
    rows = keys(len(tokens), per_prompt=2)
    ref = put(scores(tuple(rows)), tokens)
    shares = refs.split_by_tokens(ref, parts, keep_prompts=keep_prompts)
    assert shares == refs.split_by_tokens(ref, parts, keep_prompts=keep_prompts)
    assert sorted(key for share in shares for key in refs.row_keys(share)) == sorted(rows)
    assert len(shares) <= parts
    assert all(share.blocks for share in shares)
    sizes = dict(zip(rows, tokens, strict=True))
    jobs: dict[object, int] = {}
    for key in rows:
        group = key.uid if keep_prompts else key
        jobs[group] = jobs.get(group, 0) + sizes[key]
    loads = [sum(sizes[key] for key in refs.row_keys(share)) for share in shares] + [0] * (parts - len(shares))
    # Graham: no machine is ahead of another by more than its own smallest (here: the largest) job.
    assert max(loads) - min(loads) <= max(jobs.values(), default=0)
    for share in shares:
        assert refs.row_keys(share) == [key for key in rows if key in set(refs.row_keys(share))]
    if keep_prompts:
        uids = [{key.uid for key in refs.row_keys(share)} for share in shares]
        assert sum(map(len, uids)) == len({key.uid for key in rows})


def test_split_by_tokens_not_by_position():
    shares = refs.split_by_tokens(put(scores(tuple(keys(5))), [100, 1, 1, 1, 1]), 2)
    assert [len(refs.row_keys(share)) for share in shares] == [1, 4]


def test_rows_without_tokens_are_spread():
    shares = refs.split_by_tokens(put(scores(tuple(keys(4))), [0] * 4), 2)
    assert [len(refs.row_keys(share)) for share in shares] == [2, 2]


def test_no_parts_is_refused():
    with pytest.raises(InvalidArgument, match="0 parts"):
        refs.split_by_tokens(put(scores(())), 0)


def test_a_ref_does_not_grow_with_response_length():
    """Law 1: the controller's bytes depend on rows and columns only."""
    store = BatchStore(1 << 30, "host:1")
    sizes = set()
    for length in (0, 1, 100, 10_000):
        block = samples(8, length)
        sizes.add(store.put(block, run="r", step=1, tokens=[length] * 8).ByteSize())
    assert len(sizes) == 1
