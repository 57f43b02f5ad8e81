"""Rows for the endpoint, grown piece by piece, so that a weight update never waits for more than a piece.

A piece is a `generate` of a few tokens that goes on from what the row has (a partial sample): tokens sampled before an
update keep their version, and those after it have the new one.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from services.rollout.backend import EngineError, Sample, SampleRequest, SamplingParams
from services.rollout.role import Serving
from shared.rpc.errors import DeadlineExceeded, Unavailable

FIRST_PIECE, PIECE = 8, 64
"""Tokens: a stream begins soon, and each further piece costs a prefill of the row on the hf engine."""
ROW_SECONDS = 600.0
"""A request takes no longer."""


@dataclass(frozen=True)
class Grown:
    """A row after a piece."""

    place: int
    sample: Sample
    done: bool


async def grow(
    serving: Serving, uid: str, rows: Sequence[tuple[Sequence[int], int]], params: SamplingParams
) -> AsyncIterator[Grown]:
    """Grows rows to their ends, all at once; yields each after every piece.

    Args:
        rows: prompt ids and seed of each.

    Raises:
        Unavailable: the engine failed, or was given another run.
        DeadlineExceeded: after ROW_SECONDS.
    """
    grown: dict[int, Sample] = {}
    open_, piece = set(range(len(rows))), FIRST_PIECE
    try:
        async with asyncio.timeout(ROW_SECONDS):
            while open_:
                wanted = []
                for place in sorted(open_):
                    most = min(params.max_tokens, len(_ids(grown.get(place))) + piece)
                    partial = grown.get(place)
                    asked = replace(params, max_tokens=most)
                    prompt, seed = rows[place]
                    wanted.append(SampleRequest(uid, place, tuple(prompt), seed, asked, partial))
                limits = {row.sample: row.params.max_tokens for row in wanted}
                for sample in await serving.watch.unless_dead(_piece(serving, wanted)):
                    before, grown[sample.sample] = len(_ids(grown.get(sample.sample))), sample
                    ended = _ended(sample, limits[sample.sample], params.max_tokens, before)
                    open_ -= {sample.sample} if ended else set()
                    yield Grown(sample.sample, sample, ended)
                piece = min(2 * piece, PIECE)
    except TimeoutError:
        turns = ", or when the actor does not have the GPU (rollout.sleep)" if serving.config.rollout.sleep else ""
        raise DeadlineExceeded(f"not done after {ROW_SECONDS:g} s: ask for fewer tokens{turns}") from None
    except EngineError as error:
        raise Unavailable(f"the engine: {error}") from error


async def _piece(serving: Serving, wanted: list[SampleRequest]) -> list[Sample]:
    return [sample async for sample in serving.backend.generate(wanted)]


def _ended(sample: Sample, asked: int, most: int, before: int) -> bool:
    """A row that was cut by its piece, or by an abort of the engine, goes on."""
    count = len(sample.response_ids)
    if sample.finish == "aborted":
        return False
    # Fewer than asked for: the context is full.
    return sample.finish == "stop" or count >= most or count < asked or count == before


def _ids(sample: Sample | None) -> tuple[int, ...]:
    return sample.response_ids if sample else ()
