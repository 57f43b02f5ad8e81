"""Records of runs: on disk all of them, in the store those of the run in progress and of the last that ended."""

import asyncio
import json
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import structlog

from services.controller.events import stream_key
from services.controller.telemetry import RUNS
from shared.gen.sextet.v1 import controller_pb2
from shared.places import write_atomically
from shared.rpc.errors import FailedPrecondition, SextetError
from shared.state import StateStore

log = structlog.get_logger()

PREFIX = "sextet:run:"
OVER = frozenset({"done", "failed", "cancelled"})
STATES = frozenset({"queued", "running", "paused"}) | OVER
KEPT = 50
"""Runs that are over whose record and events the store keeps: a few MB each at most."""


@dataclass
class Record:
    """What is known of a run."""

    id: str
    name: str
    directory: str
    config: dict[str, Any]
    state: str = "queued"
    step: int = 0
    total_steps: int = 0
    reason: str = ""
    created: float = 0.0
    queued: float = 0.0
    finished: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def message(self) -> controller_pb2.Run:
        fields = {key: value for key, value in asdict(self).items() if key not in ("config", "queued")}
        return controller_pb2.Run(**fields, config_json=json.dumps(self.config))


class Records:
    """Reads and writes them.

    Args:
        root: records are files of `root/records`.

    Attributes:
        known: by id.
    """

    def __init__(self, store: StateStore, root: Path) -> None:
        self._store, self._root = store, root
        self._stored: set[str] = set()
        self.known: dict[str, Record] = {}

    async def load(self) -> None:
        """Reads all that there are."""
        kept = await asyncio.to_thread(_read, self._root)
        stored = await self._store.scan(PREFIX)
        # The store knows more, unless it was emptied.
        values = [*kept, *stored.values()]
        self.known = {record.id: record for value in values if (record := _record(value))}
        self._stored = {key.removeprefix(PREFIX) for key in stored}

    async def keep(self, record: Record) -> None:
        """Writes a record in both places.

        Raises:
            FailedPrecondition: the disk does not take a new run.
        """
        try:
            await asyncio.to_thread(_write, self._root, record)
        except FailedPrecondition as error:
            if record.id not in self.known:
                raise
            # The disk that stops a run may be this one: what became of the run is told by the store.
            log.error("run not saved on disk", run=record.id, error=str(error))
        await self.save(record)

    async def save(self, record: Record) -> None:
        """Best effort, in the store: the journal on disk is what counts, and the next save carries everything."""
        states = Counter(each.state for each in self.known.values())
        for state in STATES:
            RUNS.labels(state).set(states[state])
        try:
            await self._store.put(PREFIX + record.id, json.dumps(asdict(record)).encode())
            self._stored.add(record.id)
        except SextetError as error:
            log.warning("run not saved in the store", run=record.id, error=str(error))

    async def trim(self) -> None:
        """Best effort: takes the events and records of the runs that ended the longest ago from the store."""
        over = [record for id, record in self.known.items() if id in self._stored and record.state in OVER]
        for record in sorted(over, key=lambda record: -record.finished)[KEPT:]:
            try:
                # The disk may not have taken its last state.
                await asyncio.to_thread(_write, self._root, record)
                await self._store.delete(stream_key(record.id))
                await self._store.delete(PREFIX + record.id)
            except SextetError as error:
                log.warning("run not taken from the store", run=record.id, error=str(error))
                return
            self._stored.discard(record.id)


def _write(root: Path, record: Record) -> None:
    try:
        (root / "records").mkdir(parents=True, exist_ok=True)
        write_atomically(root / "records" / f"{record.id}.json", json.dumps(asdict(record)).encode())
    except OSError as error:
        raise FailedPrecondition(f"--runs-dir {str(root)!r} cannot be written: {error.strerror}") from error


def _read(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((root / "records").glob("*.json"))]


def _record(value: bytes) -> Record | None:
    """The record; one that this version can't read is left out: it must not keep all other runs from being played."""
    names = {item.name for item in fields(Record)}
    try:
        return Record(**{name: given for name, given in json.loads(value).items() if name in names})
    except (ValueError, TypeError, AttributeError) as error:
        log.error("record of a run can't be read", record=value[:200].decode(errors="replace"), error=str(error))
        return None
