"""Finished samples on this replica's disk: a restarted rollout does not draw them again, whatever its engine."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import xxhash

from services.rollout.backend import Finish, Sample, SampleRequest
from services.rollout.samples import EARLIER, samples_of
from shared.batch import columns
from shared.batch.block import Block
from shared.batch.columns import RowKey
from shared.batch.spool import Spool
from shared.config import RunConfig, dump_config
from shared.gen.sextet.v1 import rollout_pb2

T = TypeVar("T")
ANY = "*"
"""Of every version: the prompts of flows that carry some over have no greedy rows."""
_FINISHED: Mapping[str, Finish] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True)
class Place:
    """Where the samples of one Generate call are kept.

    Attributes:
        step: of the operation.
        version: of the weights that sample.
    """

    step: int
    version: int
    greedy: bool

    @property
    def label(self) -> str:
        return f"{self.version}{'greedy' if self.greedy else ''}"


class KeptSamples:
    """Keeps finished samples from when they are made until nothing goes back to their step."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def start(self, run: str, config: RunConfig) -> None:
        """This run is loaded."""
        self._spool.open(run, xxhash.xxh3_128_hexdigest(dump_config(config).encode()))

    def release(self, run: str, up_to_step: int | None) -> None:
        """See Spool."""
        self._spool.release(run, up_to_step)

    async def find(
        self, place: Place, wanted: Sequence[SampleRequest], request: rollout_pb2.GenerateRequest
    ) -> list[Sample]:
        """Those of the wanted rows that were finished before: here, or in the steps since their prompt was drawn."""
        return await asyncio.to_thread(self._find, place, wanted, _drawn(request, place), request.since)

    async def conversations(
        self, place: Place, wanted: Sequence[RowKey], request: rollout_pb2.GenerateRequest
    ) -> dict[RowKey, Block]:
        """Those of the wanted samples that were finished before, as `find`, with all their rows."""
        return await asyncio.to_thread(self._conversations, place, set(wanted), _drawn(request, place), request.since)

    def _conversations(
        self, place: Place, wanted: set[RowKey], drawn: Mapping[str, int], since: int
    ) -> dict[RowKey, Block]:
        def finished(step: int, label: str, keys: Collection[RowKey]) -> dict[RowKey, Block]:
            found: dict[RowKey, Block] = {}
            for block in self._spool.find(step, label, keys):
                if block.rows[0] in keys:
                    found.setdefault(block.rows[0], block)
            return found

        return self._since_drawn(
            place, wanted, drawn, since, finished, lambda block: block[columns.VERSIONS].data.tolist()
        )

    async def keep(self, place: Place, conversation: Block) -> None:
        """The rows of one sample are on disk when this returns."""
        await asyncio.to_thread(self._spool.add, place.step, place.label, conversation)

    def keep_finished(self, place: Place, block: Block) -> None:
        """Those rows of a block that are finished are on disk when this returns. Blocks: call it in a thread."""
        finished = zip(block.rows, block[columns.FINISH].texts(), strict=True)
        keys = [key for key, finish in finished if finish in _FINISHED]
        self._spool.add(place.step, place.label, block.select(keys, (*EARLIER, columns.FINISH)))

    def _find(
        self, place: Place, wanted: Sequence[SampleRequest], drawn: Mapping[str, int], since: int
    ) -> list[Sample]:
        rows = {RowKey(row.uid, row.sample): row for row in wanted}

        def finished(step: int, label: str, keys: Collection[RowKey]) -> dict[RowKey, Sample]:
            found: dict[RowKey, Sample] = {}
            for block in self._spool.find(step, label, keys):
                for key, sample in _samples(block).items():
                    if key in keys and _answers(sample, rows[key]):
                        found.setdefault(key, sample)
            return found

        return list(self._since_drawn(place, rows, drawn, since, finished, lambda sample: sample.versions).values())

    def _since_drawn(
        self,
        place: Place,
        wanted: Collection[RowKey],
        drawn: Mapping[str, int],
        since: int,
        finished: Callable[[int, str, Collection[RowKey]], dict[RowKey, T]],
        versions: Callable[[T], Sequence[int]],
    ) -> dict[RowKey, T]:
        """What is `finished` of this step, or of one since its prompt was drawn, if of versions that are wanted."""
        found = finished(place.step, place.label, wanted)
        # Only those on disk: a request may name steps that are billions apart.
        for step in self._spool.steps(min(drawn.values(), default=place.step), place.step):
            older = {key for key in wanted if drawn.get(key.uid, place.step) <= step}
            for key, kept in finished(step, ANY, older).items():
                if since <= min(versions(kept)) and max(versions(kept)) <= place.version:
                    found.setdefault(key, kept)
        return found


def _drawn(request: rollout_pb2.GenerateRequest, place: Place) -> dict[str, int]:
    """The steps of prompts that were drawn before this one."""
    return {prompt.uid: prompt.step for prompt in request.prompts if 0 < prompt.step < place.step}


def _answers(sample: Sample, row: SampleRequest) -> bool:
    """It is of the same prompt, and goes on with what was there."""
    begun = row.partial.response_ids if row.partial else ()
    return sample.prompt_ids == row.prompt_ids and sample.response_ids[: len(begun)] == begun


def _samples(block: Block) -> dict[RowKey, Sample]:
    finishes = dict(zip(block.rows, block[columns.FINISH].texts(), strict=True))
    held = samples_of(block.select(None, EARLIER))
    return {key: replace(sample, finish=_FINISHED[finishes[key]]) for key, sample in held.items()}
