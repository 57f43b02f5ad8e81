"""How a step's rows become mini-batches (one optimizer step each) and micro-batches (one pass each)."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from shared.batch.block import Block, RowKey
from shared.seeds import derive_seed

from .sequences import row_lengths

TOKENS = "tokens"
"""Column of the length of each row, in blocks that hold no tokens."""


def mini_batches(block: Block, size: int | None, *, seed: int, step: int, epoch: int) -> Iterator[Block]:
    """Shuffled mini-batches of at most `size` rows (None: one with all rows).

    Rows are sorted by a hash of their key and the seeds, so the order does not depend on how the rows came, on other
    rows, or on the version of a random number generator.

    Args:
        seed: the run's.
        step: the flow step.
        epoch: pass over the step's batch, from 0.
    """

    def place(key: RowKey) -> int:
        return derive_seed(seed, step, key.uid, key.sample, f"minibatch/{epoch}")

    order = sorted(block.rows, key=place)
    size = size or max(1, len(order))
    for start in range(0, len(order), size):
        yield block.select(order[start : start + size])


def micro_batches(
    block: Block, size: int, tokens: int | None = None, most: int | None = None, *, packed: bool = False
) -> Iterator[Block]:
    """Parts of at most `size` rows, the longest first: rows of similar length together, so that little is padded.

    What shares a part does not depend on the order of the block's rows: a row's last bits may depend on its company.

    Args:
        tokens: in place of `size`: rows times the longest of them is at most this; a longer row has a part of its own.
        most: rows of a part, whatever size and tokens allow.
        packed: nothing is padded: the tokens of all rows are at most `tokens`.
    """
    lengths = row_totals(block)
    order = sorted(block.rows, key=lambda key: (-lengths[key], key))
    start = 0
    while start < len(order):
        count = size if tokens is None else _fitting([lengths[key] for key in order[start:]], tokens, packed)
        count = count if most is None else min(count, most)
        yield block.select(order[start : start + count])
        start += count


def _fitting(lengths: Sequence[int], tokens: int, packed: bool) -> int:
    """How many of the first rows fit, at least one; the longest come first."""
    taken = itertools.accumulate(lengths) if packed else (lengths[0] * n for n in range(1, len(lengths) + 1))
    return max(1, sum(1 for _ in itertools.takewhile(lambda sum_: sum_ <= tokens, taken)))


class Share(NamedTuple):
    """A micro-batch that one rank computes."""

    rows: Block
    counts: bool
    """False: another rank computes these rows, too; this one only keeps step, as every pass is done by all ranks."""


def my_micro_batches(
    block: Block, size: int, tokens: int | None = None, *, rank: int = 0, ranks: int = 1, packed: bool = False
) -> list[Share]:
    """The micro-batches of one rank: as many as every other rank has, of about the same lengths in each round."""
    most = None if ranks == 1 else -(-len(block) // ranks)
    micros = list(micro_batches(block, size, tokens, most, packed=packed))
    mine = [Share(micro, True) for micro in micros[rank::ranks]]
    if len(mine) < -(-len(micros) // ranks):
        shortest = micros[-1]
        mine.append(Share(shortest.select(shortest.rows[-1:]), False))
    return mine


def rows_of(shares: Sequence[Share]) -> list[RowKey]:
    """The rows of all of them, each once."""
    return list(dict.fromkeys(key for share in shares for key in share.rows.rows))


def row_totals(block: Block) -> dict[RowKey, int]:
    """Tokens of each row, prompt and response; of rows that are known by their length only, column `tokens`."""
    if TOKENS in block:
        return dict(zip(block.rows, block[TOKENS].scalars().tolist(), strict=True))
    prompt_B, response_B = row_lengths(block)
    return dict(zip(block.rows, (prompt_B + response_B).tolist(), strict=True))


@contextlib.contextmanager
def enough_memory(micro: Block) -> Iterator[None]:
    """Says of a micro-batch that does not fit into memory what to lower, and to how much."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        rows, longest = len(micro), max(row_totals(micro).values())
        smaller = (
            f"lower micro_batch_size to {rows // 2} (or set micro_batch_tokens to {rows * longest // 2})"
            if rows > 1
            else "its only row is too long: set gradient_checkpointing or parallel.cp, or lower rollout.max_tokens"
        )
        why = str(error).partition("\n")[0]
        raise MemoryError(f"{smaller}: a micro-batch of {rows} x {longest} tokens does not fit: {why}") from error
