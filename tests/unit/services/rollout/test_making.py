"""A call's block is made of its samples as they come, in parts, and is the same as if it had been made at the end."""

from collections.abc import Sequence

import pytest

from services.rollout import making
from services.rollout.backend import Sample
from services.rollout.making import Making
from services.rollout.samples import cut_of, earlier_of, metrics_of, oldest_of, token_counts
from shared.batch import columns
from shared.batch.block import Block, Ragged, RowKey

SAMPLES = [
    Sample("1:0:0", n, (1, 2), (7,) * n, (-0.5,) * n, tuple(range(3, 3 + n)), "aborted" if n % 3 == 0 else "stop")
    for n in range(10)
]


def make(samples: Sequence[Sample]) -> Block:
    finishes = Ragged.from_text([sample.finish for sample in samples])
    keys = tuple(RowKey(sample.uid, sample.sample) for sample in samples)
    return Block(keys, {**earlier_of(samples), columns.FINISH: finishes})


@pytest.mark.parametrize("part_rows", [1, 3, 64])
@pytest.mark.parametrize("already", [0, 4, 10])
async def test_parts_make_the_same_block_in_the_order_asked_for(
    part_rows: int, already: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "PART_ROWS", part_rows)
    monkeypatch.setattr(making, "PART_SECONDS", 1e9)
    kept: list[Block] = []
    made = Making(make, kept.append, SAMPLES[:already])
    for sample in reversed(SAMPLES[already:]):
        await made.add(sample)
    assert [len(part) for part in kept] == [part_rows] * ((10 - already) // part_rows), "while others are sampled"
    block = await made.block([RowKey("1:0:0", n) for n in range(10)])
    assert block.digest() == make(SAMPLES).digest()
    on_disk = [key.sample for part in kept for key in part.rows]
    assert on_disk == [*reversed(range(already, 10))], "what was on disk is not written again"


def test_what_is_told_of_a_block() -> None:
    block = make(SAMPLES)
    assert token_counts(block) == [2 + n for n in range(10)]
    assert oldest_of(block, 9) == [9, *[3] * 9], "a row without a token has none: it is as new as the engine"
    assert cut_of(block) == [0, 3, 6, 9]
    numbers = metrics_of(block, earlier=5, seconds=2.0)
    assert numbers["response_tokens"] == 40
    assert numbers["tokens_per_second"] == 20
    assert numbers["prompt_tokens"] == 20
    assert numbers["response_length"] == 4.5
    assert (numbers["response_length_min"], numbers["response_length_max"]) == (0, 9)
    assert (numbers["truncated_share"], numbers["logprob"]) == (0, -0.5)
