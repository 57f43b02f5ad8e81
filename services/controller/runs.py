"""Runs: made, queued, played one at a time, paused, resumed, cancelled; kept in the store over restarts."""

import asyncio
import contextlib
import json
import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from services.controller import checkpoints, events
from services.controller.cluster import Cluster
from services.controller.conductor import Conductor, Deposed, past_the_end
from services.controller.flows import load_flow
from services.controller.journal import CannotWrite, MustWait, parts
from services.controller.leader import Leadership
from services.controller.profiles import Calls
from services.controller.records import OVER, Record, Records
from services.controller.replica import until_first
from shared.config import ConfigError, RunConfig, dump_config
from shared.config_loading import load_config, parse_config
from shared.gen.sextet.v1 import controller_pb2
from shared.places import Place, place
from shared.rpc.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from shared.state import StateStore

log = structlog.get_logger()

CHECKPOINT_SECONDS = PROFILE_SECONDS = 3600.0
LEADING_SECONDS = 5.0
RETRY_SECONDS = 0.2
STANDS_BY = "this controller stands by while another leads: ask that one, or wait"
T = TypeVar("T")
_CURSOR = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")


@dataclass
class Active:
    """The run that is being played."""

    record: Record
    conductor: Conductor
    task: "asyncio.Task[str]"
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False


class Runs:
    """All runs of this controller.

    Args:
        root: where runs without a directory of their own go.
    """

    def __init__(self, store: StateStore, cluster: Cluster, leadership: Leadership, root: Path) -> None:
        self._store, self._cluster, self._leadership, self._root = store, cluster, leadership, root
        self._records = Records(store, root)
        self._wake = asyncio.Event()
        self._active: Active | None = None
        self._creating = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._telling: set[str] = set()
        self._changing: set[asyncio.Task[Any]] = set()
        self._loaded = asyncio.Event()

    @contextlib.asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """Plays queued runs meanwhile, while this controller leads; a run in progress is taken up again."""
        task = asyncio.create_task(self._lead())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, *self._changing, return_exceptions=True)

    @property
    def active(self) -> str:
        """Id of the run that is being played; "" when none is."""
        return self._active.record.id if self._active else ""

    async def create(self, config_json: str, id: str = "") -> Record:
        """Queues a run. The same id with the same configuration again answers the run that is there.

        Raises:
            InvalidArgument: the configuration, in the words of ConfigError, or a directory that can't be written.
            FailedPrecondition: resume_from is no complete checkpoint.
            AlreadyExists: the id with another configuration, or a directory that is taken.
        """
        await self._leading()
        config = _checked(config_json)
        await asyncio.to_thread(_check_start, config)
        content = json.loads(dump_config(config))
        id = _check_id(id) or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        return await self._to_its_end(self._make(id, config, content))

    async def _make(self, id: str, config: RunConfig, content: dict[str, Any]) -> Record:
        async with self._creating:
            if known := self._records.known.get(id):
                if known.config != content:
                    raise AlreadyExists(f"run {id!r} exists with another configuration: choose another id")
                return known
            now = time.time()
            directory = await asyncio.to_thread(_free_directory, Path(config.directory or self._root / id))
            record = Record(id, config.name, directory, content, created=now, queued=now)
            record.total_steps = config.total_steps or 0
            # Durable before it can be played, or answered for.
            await self._enter(record, "queued")
            self._records.known[id] = record
        self._wake.set()
        return record

    async def get(self, id: str) -> Record:
        """The run.

        Raises:
            NotFound: there is none; Unavailable: another controller leads.
        """
        await self._leading()
        if id not in self._records.known:
            raise NotFound(f"there is no run {id!r}; runs: {', '.join(sorted(self._records.known)[-5:]) or 'none'}")
        return self._records.known[id]

    async def list(self) -> "list[Record]":
        """All runs, the newest first."""
        await self._leading()
        return sorted(self._records.known.values(), key=lambda record: -record.created)

    async def watch(self, id: str, after: str) -> AsyncIterator[controller_pb2.RunEvent]:
        """The run's events after a cursor, until it is over.

        Raises:
            NotFound, InvalidArgument (the cursor); Unavailable: another controller leads, at once or meanwhile.
        """
        record = await self.get(id)
        if after and not _CURSOR.fullmatch(after):
            raise InvalidArgument(f"after: {after[:40]!r} is no cursor: give that of an event of this run, or none")

        def over() -> bool:
            if not self._leadership.leads:
                # It would seem to go on for ever: what becomes of it is not known here any more.
                raise Unavailable(STANDS_BY)
            # Looked up anew: another controller may have led meanwhile.
            return self._records.known.get(id, record).state in OVER and id not in self._telling

        async for event in events.follow(self._store, id, after, over):
            yield event

    async def pause(self, id: str) -> Record:
        """Pauses: at once when queued, after the step in progress when running."""
        record = await self.get(id)
        if record.state == "queued":
            await self._to_its_end(self._enter(record, "paused"))
        elif record.state == "running":
            if active := self._playing(record):
                active.conductor.pausing.set()
        elif record.state != "paused":
            raise FailedPrecondition(f"run {id!r} is {record.state}: only queued and running ones can be paused")
        return record

    async def resume(self, id: str) -> Record:
        """Queues a paused run again, or a failed one from its last checkpoint."""
        record = await self.get(id)
        if record.state in ("paused", "failed"):
            record.finished, record.queued = 0.0, time.time()
            await self._to_its_end(self._queue(record))
        elif active := self._playing(record):
            active.conductor.pausing.clear()
        elif record.state != "queued":
            raise FailedPrecondition(f"run {id!r} is {record.state}: only paused and failed ones can be resumed")
        return record

    async def _queue(self, record: Record) -> None:
        await self._enter(record, "queued")
        self._wake.set()

    async def cancel(self, id: str) -> Record:
        """Ends a run now."""
        # Who cuts off its creation, cancels it: it may be in the making.
        async with self._creating:
            record = await self.get(id)
        if record.state in ("done", "failed"):
            raise FailedPrecondition(f"run {id!r} is {record.state} already")
        if active := self._playing(record):
            active.cancelled = True
            active.task.cancel()
            await active.ended.wait()
        elif record.state != "cancelled":
            await self._to_its_end(self._enter(record, "cancelled"))
        return record

    async def checkpoint(self, id: str) -> tuple[str, int]:
        """A checkpoint after the step in progress: its directory and step."""
        record = await self.get(id)
        active = self._playing(record)
        if active is None:
            raise FailedPrecondition(f"run {id!r} is {record.state}: only a running one can be saved")
        try:
            async with asyncio.timeout(CHECKPOINT_SECONDS):
                return await active.conductor.checkpoint()
        except TimeoutError:
            raise DeadlineExceeded(f"run {id!r} was not saved within {CHECKPOINT_SECONDS:g} s") from None

    async def profile(self, id: str, role: str, steps: int) -> Calls:
        """Has a role's calls in the next steps recorded: what their ranks have seen."""
        record = await self.get(id)
        active = self._playing(record)
        if active is None:
            raise FailedPrecondition(f"run {id!r} is {record.state}: only a running one can be profiled")
        try:
            async with asyncio.timeout(PROFILE_SECONDS):
                return await active.conductor.profile(role, steps)
        except TimeoutError:
            raise DeadlineExceeded(f"run {id!r} did not do {steps} steps within {PROFILE_SECONDS:g} s") from None

    async def _to_its_end(self, change: Coroutine[Any, Any, T]) -> T:
        """Makes a change though who asked for it goes away: half of it would be known on disk only, or only here.

        Raises:
            Unavailable: another controller leads by now.
        """
        task = asyncio.create_task(change)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        try:
            return await asyncio.shield(task)
        except Deposed:
            raise Unavailable(STANDS_BY) from None

    def _playing(self, record: Record) -> Active | None:
        return self._active if self._active and self._active.record is record else None

    async def _lead(self) -> None:
        while True:
            await self._leadership.gained.wait()
            try:
                await self._load()
                await until_first(self._work(), self._leadership.lost.wait())
            except Deposed as error:
                log.warning("another controller has taken over", error=str(error))
            except Exception as error:
                log.error("playing runs was interrupted", error=str(error), exc_info=True)
            finally:
                self._loaded.clear()
            await asyncio.sleep(RETRY_SECONDS)

    async def _load(self) -> None:
        await self._records.load()
        await self._records.trim()
        self._loaded.set()

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            if record := self._next():
                await self._play(record)
            else:
                await self._wake.wait()

    async def _leading(self) -> None:
        """Waits a moment for a controller that has just started; refuses where another leads."""
        try:
            async with asyncio.timeout(LEADING_SECONDS):
                await self._loaded.wait()
        except TimeoutError:
            raise Unavailable(STANDS_BY) from None

    def _next(self) -> Record | None:
        """A run that was in progress when the controller ended goes first; then the one that waits the longest."""
        waiting = [record for record in self._records.known.values() if record.state in ("queued", "running")]
        return min(waiting, key=lambda record: (record.state != "running", record.queued), default=None)

    async def _play(self, record: Record) -> None:
        try:
            config = load_config(record.config)
            conductor = Conductor(
                self._store,
                self._cluster,
                record.id,
                config,
                Path(record.directory),
                self._on_step(record),
                self._leadership.confirm,
            )
        except CannotWrite as error:
            await self._enter(record, "failed", str(error))
            return
        except Exception as error:  # noqa: BLE001  (a flow file that is gone, a journal that can't be read)
            await self._enter(record, "failed", f"{type(error).__name__}: {error}")
            return
        task = asyncio.create_task(conductor.play())
        active = self._active = Active(record, conductor, task)
        try:
            await self._enter(record, "running")
            state, reason = await self._outcome(active)
            self._active = None
            await self._enter(record, state, reason)
            active.ended.set()
            # A role that still computes lets go later; nobody has to wait for it.
            if state in OVER:
                await conductor.release()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._active = None
            active.ended.set()

    async def _outcome(self, active: Active) -> tuple[str, str]:
        try:
            await asyncio.wait({active.task})
            return active.task.result(), ""
        except asyncio.CancelledError:
            if active.cancelled:
                return "cancelled", ""
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            # Raised in the run itself, by its flow: it must not end the playing of all other runs.
            log.error("run failed", exc_info=True)
            return "failed", "CancelledError: the run was cancelled from within, and nobody had asked for it"
        except Deposed:
            raise
        except MustWait as error:
            log.error("run has to wait", exc_info=True)
            record = active.record
            return "paused", f"{error}; `sextet resume {record.id}` then goes on from step {record.step}"
        except Exception as error:
            log.error("run failed", exc_info=True)
            return "failed", str(error) or type(error).__name__

    def _on_step(self, record: Record) -> Any:
        async def on_step(step: int, total: int, metrics: dict[str, float] | None) -> None:
            record.step, record.total_steps = step, total
            record.metrics = record.metrics if metrics is None else metrics
            if not await self._leadership.confirm():
                raise Deposed("the lease on leading is another's")
            await self._records.save(record)

        return on_step

    async def _enter(self, record: Record, state: str, reason: str = "") -> None:
        record.state, record.reason = state, reason
        record.finished = time.time() if state in OVER else 0.0
        # Who watches a run that is over gets its last event, and then the end.
        self._telling.add(record.id)
        try:
            async with self._saving:
                if not await self._leadership.confirm():
                    raise Deposed("the lease on leading is another's")
                await self._records.keep(record)
            stream = events.Events(self._store, record.id)
            if reason:
                await stream.send("error", reason, record.step)
            await stream.send("state", state, record.step)
            if state in OVER:
                await self._records.trim()
        finally:
            self._telling.discard(record.id)


def _checked(config_json: str) -> RunConfig:
    try:
        config = parse_config(config_json)
        load_flow(config.flow).check(config)
    except ConfigError as error:
        raise InvalidArgument(str(error)) from None
    return config


def _check_start(config: RunConfig) -> None:
    if config.checkpoint.directory:
        probe = _place("checkpoint.directory", config.checkpoint.directory) / f".{secrets.token_hex(4)}"
        try:
            probe.write(b"")
            probe.remove()
        except OSError as error:
            raise InvalidArgument(f"checkpoint.directory cannot be written: {error}") from error
    if config.resume_from:
        step = checkpoints.load(_place("resume_from", config.resume_from)).position.step
        if config.total_steps and step >= config.total_steps:
            raise InvalidArgument(past_the_end(config, step, config.total_steps))


def _place(key: str, text: str) -> Place:
    try:
        return place(text)
    except ValueError as error:
        raise InvalidArgument(f"{key}: {error}") from None


def _free_directory(path: Path) -> str:
    directory = path.absolute()
    try:
        taken = bool(parts(directory))
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise InvalidArgument(f"directory: {str(directory)!r} cannot be written: {error.strerror}") from error
    if taken:
        raise AlreadyExists(
            f"directory: {str(directory)!r} holds another run: choose another, "
            "or set resume_from to one of its checkpoints"
        )
    return str(directory)


def _check_id(id: str) -> str:
    """Ids become directory and key names."""
    if id and not (len(id) <= 64 and id.replace("-", "").replace("_", "").replace(".", "").isalnum() and id[0] != "."):
        raise InvalidArgument(f"id: {id!r} must be up to 64 letters, digits, '-', '_' and '.'")
    return id
