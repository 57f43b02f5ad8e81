"""What a run has done, on disk: one JSON line per fact, synced before the next step begins."""

import asyncio
import base64
import contextlib
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shared.failpoints import hit_async
from shared.gen.sextet.v1 import weights_pb2
from shared.places import Place

FIRST = "journal.jsonl"
MAX_BYTES = 4 << 20
"""Of one part of a journal; two are kept."""


class MustWait(Exception):
    """Why a run can't go on without people. The roles still hold all of it: it waits, paused."""


class CannotWrite(MustWait):
    """What a run has to keep can't be kept."""

    def __init__(self, what: str, path: Place | Path, cause: BaseException) -> None:
        words = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        super().__init__(f"{what}: {str(path)!r} cannot be written: {words}")


@dataclass(frozen=True)
class Position:
    """Where a run stands between two steps.

    Attributes:
        step: steps committed.
        position: prompts taken from the dataset order.
        versions: optimizer steps of actor and critic.
        weights: the WeightsRef that rollouts serve, base64; "" for the model as configured.
        stock: prompts that were drawn and not trained yet (see stock.py); {}: none.
    """

    step: int = 0
    position: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    weights: str = ""
    stock: dict[str, Any] = field(default_factory=dict)

    @property
    def weights_ref(self) -> weights_pb2.WeightsRef | None:
        return weights_pb2.WeightsRef.FromString(base64.b64decode(self.weights)) if self.weights else None


def encode_weights(weights: weights_pb2.WeightsRef | None) -> str:
    """The form in which a journal keeps a WeightsRef."""
    return base64.b64encode(weights.SerializeToString()).decode() if weights else ""


class Journal:
    """The journal of one run. Records: begin, issue, commit, checkpoint, rollback.

    Attributes:
        begun: the run was set up once.
        position: the last commit, or the beginning.
        epoch: the highest term that wrote.
        take: rollbacks so far.
        facts: what roles said when the run was set up.
        issued: changes of state ("actor.update") that were sent in the step after `position`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = False
        self.position = Position()
        self.epoch = 0
        self.take = 0
        self.facts: dict[str, dict[str, str]] = {}
        self.issued: set[str] = set()

    @classmethod
    def open(cls, directory: Path) -> "Journal":
        """Reads the journal of a run directory, or begins one. A torn last line is cut off.

        Raises:
            CannotWrite: the directory can't be made.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite("directory", directory, error) from error
        journal = cls(directory / FIRST)
        for path in parts(directory):
            journal.path = path
            text = path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            for line in whole.splitlines():
                journal._take_in(json.loads(line))
            if len(whole) < len(text):
                with path.open("r+b") as file:
                    file.truncate(len(whole))
                    os.fsync(file.fileno())
        return journal

    async def begin(self, epoch: int, position: Position, facts: Mapping[str, Mapping[str, str]]) -> None:
        """The run is set up and stands at `position`."""
        await self._write(kind="begin", epoch=epoch, facts=facts, **asdict(position))

    async def issue(self, epoch: int, name: str) -> None:
        """A change of state is about to be sent."""
        if name not in self.issued:
            await self._write(kind="issue", epoch=epoch, name=name, step=self.position.step + 1)

    async def commit(self, epoch: int, position: Position) -> None:
        """A step is done."""
        await self._write(kind="commit", epoch=epoch, **asdict(position))
        await asyncio.to_thread(self._go_on_in_next_part)

    async def rollback(self, epoch: int, cause: str) -> None:
        """A take has ended; where the next one begins, its `begin` says."""
        await self._write(kind="rollback", epoch=epoch, cause=cause, take=self.take + 1, **asdict(self.position))

    async def _write(self, **record: Any) -> None:
        line = _encoded(record)
        await hit_async(f"controller.before_{record['kind']}")
        await asyncio.to_thread(append_line, self.path, line)
        await hit_async(f"controller.after_{record['kind']}")
        self._take_in(json.loads(line))

    def _go_on_in_next_part(self) -> None:
        """Once this part is full, what it comes to begins the next one, and the part before this one goes.

        Parts are never rewritten, so that a controller that was deposed cannot undo what another has written: the part
        that it begins in ignorance is of an older epoch.

        Raises:
            CannotWrite: the disk is full, the directory is gone or read-only.
        """
        try:
            self._begin_next_part()
        except OSError as error:
            raise CannotWrite("directory", self.path.parent, error) from error

    def _begin_next_part(self) -> None:
        if self.path.stat().st_size < MAX_BYTES:
            return
        record = {"kind": "begin", "epoch": self.epoch, "facts": self.facts, "take": self.take}
        path = self.path.with_name(f"journal.{_number(self.path) + 1}.jsonl")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return
        append_line(path, _encoded(record | asdict(self.position)))
        older, self.path = parts(path.parent), path
        for part in older[: older.index(path) - 1]:
            part.unlink(missing_ok=True)

    def _take_in(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        # Written by a controller that was deposed and did not know it yet: as if it had never been.
        if record["epoch"] < self.epoch:
            return
        self.epoch = record["epoch"]
        if kind == "issue":
            self.issued.add(record["name"])
            return
        # A run that is taken up again plays the same step on: what it issued is still issued.
        if record["kind"] != "begin" or record["step"] != self.position.step:
            self.issued = set()
        place = record["step"], record["position"], record["versions"], record["weights"]
        self.position = Position(*place, record.get("stock", {}))
        self.begun = True
        self.facts = record.get("facts", self.facts)
        self.take = record.get("take", self.take)


def parts(directory: Path) -> list[Path]:
    """The files of a run's journal, the oldest first."""
    return sorted(directory.glob("journal*.jsonl"), key=_number)


def _number(path: Path) -> int:
    name = path.name.removeprefix("journal").removesuffix(".jsonl").lstrip(".")
    return int(name) if name.isdecimal() else 0


def _encoded(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def append_line(path: Path, line: bytes) -> None:
    """Adds a line to a file of the run's directory, synced, or nothing of it.

    Raises:
        CannotWrite: the disk is full, the directory is gone or read-only.
    """
    try:
        with path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                # A torn line would spoil the one that follows.
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise
    except OSError as error:
        raise CannotWrite("directory", path.parent, error) from error
