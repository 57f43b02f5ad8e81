"""The block of a Generate call: made, and kept on disk, while the call's other rows are still being sampled."""

import asyncio
import time
from collections.abc import Callable, Sequence

from services.rollout.backend import Sample
from services.rollout.samples import together
from shared.batch.block import Block
from shared.batch.columns import RowKey

PART_ROWS = 64
PART_SECONDS = 1.0
"""So many finished samples, or those of so many seconds, become a part at once: each part is a write to disk."""


class Making:
    """Takes the samples of one call as they are finished.

    Args:
        make: a block of some of them. Runs in a thread, as `keep` does.
        keep: has what is finished of a part on disk when it returns.
        already: samples that are on disk.
    """

    def __init__(
        self, make: Callable[[Sequence[Sample]], Block], keep: Callable[[Block], None], already: Sequence[Sample]
    ) -> None:
        self._make, self._keep, self._already = make, keep, already
        self._waiting: list[Sample] = []
        self._parts: list[Block] = []
        self._last = time.monotonic()

    async def add(self, sample: Sample) -> None:
        """The next one."""
        self._waiting.append(sample)
        if len(self._waiting) >= PART_ROWS or time.monotonic() - self._last > PART_SECONDS:
            waiting, self._waiting = self._waiting, []
            await asyncio.to_thread(self._keep, await self._part(waiting))
            self._last = time.monotonic()

    async def block(self, rows: Sequence[RowKey]) -> Block:
        """All of them, in this order; what is finished is on disk when this returns."""
        last = [await self._part(self._waiting)] if self._waiting else []
        if self._already:
            await self._part(self._already)
        ordering = asyncio.to_thread(lambda: together(self._parts).select(rows))
        block, _ = await asyncio.gather(ordering, asyncio.to_thread(lambda: [self._keep(part) for part in last]))
        return block

    async def _part(self, samples: Sequence[Sample]) -> Block:
        part = await asyncio.to_thread(self._make, samples)
        self._parts.append(part)
        return part
