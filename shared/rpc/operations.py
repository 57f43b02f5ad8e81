"""Law 3: every mutating call is an operation that is done once, however often and in whatever order it is asked for.

An id `(run, step, name, part)` is bound to the first payload it comes with. While its work runs, further calls attach
to it; when it is done they get the stored response; when it failed they try again. The work runs in its own task: a
caller that goes away never stops it. Older epochs are refused, and so is what was released already.
"""

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import structlog
import xxhash
from google.protobuf.message import Message

from shared.failpoints import hit_async
from shared.gen.sextet.v1 import common_pb2
from shared.rpc.errors import (
    Aborted,
    FailedPrecondition,
    InvalidArgument,
    PartlyApplied,
    PayloadMismatch,
    ResourceExhausted,
    SextetError,
    StaleEpoch,
    Unavailable,
)
from shared.rpc.history import Applied, History
from shared.telemetry import metrics

log = structlog.get_logger()
Response = TypeVar("Response", bound=Message)

NO_PAYLOAD = frozenset({"operation", "profile"})
"""Fields of a request that change nothing about what is done."""
_ALL_STEPS = 2**63 - 1
_MAX_RUNS_REMEMBERED = 1024


class Key(NamedTuple):
    """An operation id as a dictionary key."""

    run: str
    step: int
    name: str
    part: str

    def to_proto(self) -> common_pb2.OperationId:
        return common_pb2.OperationId(run=self.run, step=self.step, name=self.name, part=self.part)

    def as_details(self) -> dict[str, str]:
        return {"run": self.run, "step": str(self.step), "name": self.name, "part": self.part}


@dataclass
class _Entry(Generic[Response]):
    """One operation: running (task), done (response), failed for good (failure), or failed and free to try again."""

    digest: bytes
    epoch: int
    prompts: list[str] = field(default_factory=list)
    task: "asyncio.Task[Response] | None" = None
    response: Response | None = None
    failure: PartlyApplied | None = None
    started: bool = False
    forgotten: bool = False


class _Lane:
    """Lets one operation through at a time, in order of arrival."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.members = 0


class Operations:
    """The operations of one service process.

    Args:
        max_queued: operations that may wait in one lane; more are refused with ResourceExhausted.
        max_kept: operations remembered until they are forgotten; more are refused.
        history: where changes of state are noted, too.

    Attributes:
        applied: the last change of state.
    """

    def __init__(self, max_queued: int = 64, max_kept: int = 20_000, history: History | None = None) -> None:
        self._max_queued, self._max_kept, self._history = max_queued, max_kept, history
        self._entries: dict[Key, _Entry[Any]] = {}
        # Per run: the steps up to here were released, in this epoch.
        self._released: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._lanes: dict[str, _Lane] = defaultdict(_Lane)
        self._background: set[asyncio.Task[None]] = set()
        self._draining = False
        self.epoch = 0
        # Told (run, step) when work ends whose step was released meanwhile: what it made is nobody's.
        self.on_late_end: Callable[[str, int], object] = lambda run, step: None
        self.applied: Applied | None = None

    async def run(
        self, request: Any, work: Callable[[], Awaitable[Response]], *, lane: str | None = None, mutates: bool = False
    ) -> Response:
        """Does the request's operation once and answers every call of it.

        Args:
            request: has a field `operation`; all its other fields are the payload.
            work: does it. When it raises, nothing may have been applied; it raises PartlyApplied otherwise.
            lane: operations of one lane run one after the other ("engine": everything that computes).
            mutates: it changes the role's state and becomes `applied`.

        Raises:
            InvalidArgument, StaleEpoch, PayloadMismatch, FailedPrecondition (released), ResourceExhausted,
            Unavailable (draining), Aborted (superseded while waiting), and whatever the work raises.
        """
        operation = request.operation
        key = _key(operation)
        self.observe_epoch(operation.epoch)
        self._refuse_released(key, operation.epoch)
        entry = self._bind(key, payload_digest(request), operation.epoch)
        await hit_async(f"{key.name}.received")
        if entry.response is not None or entry.task is not None:
            metrics.OPERATIONS_ATTACHED.labels(metrics.bounded(key.name)).inc()
        if entry.failure is not None:
            raise entry.failure
        if entry.response is not None:
            return entry.response
        if entry.task is None:
            entry.started = False  # an attempt before this one may have begun and failed
            entry.prompts = _prompts(request) if mutates and self._history else []
            entry.task = self._start(key, entry, work, lane, mutates)
        return await _attach(entry.task)

    @property
    def last_applied(self) -> common_pb2.OperationId | None:
        """Id of the last change of state."""
        return self.applied.id if self.applied else None

    def restore(self, applied: Applied) -> None:
        """Takes up the last change of a state that was loaded: asked for again, it is answered, not done again."""
        key = Key(applied.id.run, applied.id.step, applied.id.name, applied.id.part)
        self._entries[key] = _Entry(applied.digest, applied.epoch, response=applied.response)
        self.applied = applied

    def observe_epoch(self, epoch: int) -> None:
        """Takes note of a controller's term; refuses an older one than the highest seen."""
        if epoch < self.epoch:
            raise StaleEpoch(
                f"epoch {epoch} is over: a controller of epoch {self.epoch} has taken over",
                epoch=str(epoch),
                **self._position(),
            )
        self.epoch = epoch

    def running(self) -> list[common_pb2.OperationId]:
        """Operations running or waiting for their lane."""
        return [key.to_proto() for key, entry in self._entries.items() if entry.task is not None]

    def forget(self, run: str, up_to_step: int | None = None) -> None:
        """Drops results of steps up to this one (None: of the whole run) and refuses late calls of them.

        Running work goes on to its end; work that still waits for its lane is given up.
        """
        step = _ALL_STEPS if up_to_step is None else up_to_step
        at_epoch, before = self._released.get(run, (-1, -1))
        self._released[run] = (self.epoch, max(step, before) if at_epoch == self.epoch else step)
        self._released.move_to_end(run)
        # Older runs are fenced by their epoch anyway.
        while len(self._released) > _MAX_RUNS_REMEMBERED:
            self._released.popitem(last=False)
        self._drop(run, lambda key: key.step <= step)

    def restart(self, run: str) -> None:
        """Drops what the run did in its steps (not its set-up): the state was reset, and they are done again."""
        self._released.pop(run, None)
        self._drop(run, lambda key: key.step > 0)
        self.applied = None

    async def exclusively(self, lane: str, work: Callable[[], Awaitable[None]]) -> None:
        """Does idempotent work alone in a lane; a caller that goes away does not stop it."""

        async def alone() -> None:
            async with self._lanes[lane].lock:
                await work()

        task = asyncio.create_task(alone())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await _attach(task)

    async def drain(self, timeout: float) -> bool:
        """Refuses new operations and waits for the running ones; answers whether all came to their end."""
        self._draining = True
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None] + [*self._background]
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=timeout)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=1)
        return not pending

    def _refuse_released(self, key: Key, epoch: int) -> None:
        at_epoch, step = self._released.get(key.run, (-1, -1))
        # A later controller may go back to a checkpoint and do released steps again.
        if epoch <= at_epoch and key.step <= step and key not in self._entries:
            raise FailedPrecondition(
                f"{_show(key)}: step {key.step} of run {key.run} was released already",
                **key.as_details(),
                **self._position(),
            )

    def _position(self) -> dict[str, str]:
        """Where this role stands, for who is refused."""
        position = {"highest": str(self.epoch)}
        if self.applied:
            position |= {"applied_name": self.applied.id.name, "applied_step": str(self.applied.id.step)}
        return position

    def _bind(self, key: Key, digest: bytes, epoch: int) -> _Entry[Any]:
        entry = self._entries.get(key)
        if entry is None:
            if self._draining:
                raise Unavailable("this service is shutting down and takes no new operations", **key.as_details())
            if len(self._entries) >= self._max_kept:
                raise ResourceExhausted(f"{len(self._entries)} operations are remembered: release committed steps")
            entry = self._entries[key] = _Entry(digest, epoch)
        if entry.digest != digest:
            raise PayloadMismatch(
                f"{_show(key)} was called before with another payload: an id names one piece of work; "
                "change `part` for different work",
                **key.as_details(),
                **self._position(),
            )
        entry.epoch = max(entry.epoch, epoch)
        return entry

    def _start(
        self, key: Key, entry: _Entry[Any], work: Callable[[], Awaitable[Any]], lane: str | None, mutates: bool
    ) -> "asyncio.Task[Any]":
        if lane is not None and self._lanes[lane].members > self._max_queued:
            del self._entries[key]
            raise ResourceExhausted(f"{self._max_queued} operations wait for {lane!r} already", **key.as_details())
        task = asyncio.create_task(self._perform(key, entry, work, lane, mutates), name=_show(key))
        # Nobody may be listening any more when it fails; the log has it.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    async def _perform(
        self, key: Key, entry: _Entry[Any], work: Callable[[], Awaitable[Any]], lane: str | None, mutates: bool
    ) -> Any:
        with structlog.contextvars.bound_contextvars(run=key.run, step=key.step, operation=key.name, part=key.part):
            call = _Call(metrics.bounded(key.name))
            try:
                if lane is None:
                    response = await self._work(key, entry, work, call)
                else:
                    response = await self._in_lane(self._lanes[lane], key, entry, work, call)
                if mutates:
                    await self._note(key, entry, response)
                entry.response = response
                await hit_async(f"{key.name}.done")
                call.ended("ok")
                return response
            except PartlyApplied as error:
                entry.failure = error
                call.ended("partly_applied", error)
                raise
            except asyncio.CancelledError:
                call.ended("cancelled")
                raise
            except Exception as error:
                call.ended("failed", error)
                raise
            finally:
                entry.task = None
                if entry.forgotten:
                    self._entries.pop(key, None)
                    # Not of a state that was only lost: what was made with it before is still wanted.
                    if key.step <= self._released.get(key.run, (-1, -1))[1]:
                        self.on_late_end(key.run, key.step)

    async def _in_lane(self, lane: _Lane, key: Key, entry: _Entry[Any], work: Any, call: "_Call") -> Any:
        lane.members += 1
        try:
            async with lane.lock:
                return await self._work(key, entry, work, call)
        finally:
            lane.members -= 1

    async def _work(self, key: Key, entry: _Entry[Any], work: Callable[[], Awaitable[Any]], call: "_Call") -> Any:
        # Its caller may have been replaced, or its step released, while it waited.
        if entry.epoch < self.epoch or self._entries.get(key) is not entry:
            raise Aborted(f"{_show(key)} was given up before it began", **key.as_details())
        entry.started = True
        call.began()
        await hit_async(f"{key.name}.begin")
        response = await work()
        await hit_async(f"{key.name}.applied")
        return response

    async def _note(self, key: Key, entry: _Entry[Any], response: Any) -> None:
        self.applied = Applied(key.to_proto(), entry.epoch, entry.digest, response)
        if self._history:
            await asyncio.to_thread(self._history.add, self.applied, entry.prompts)

    def _drop(self, run: str, chosen: Callable[[Key], bool]) -> None:
        for key in [key for key in self._entries if key.run == run and chosen(key)]:
            entry = self._entries[key]
            if entry.task is None or not entry.started:
                del self._entries[key]
            else:
                entry.forgotten = True


async def _attach(task: "asyncio.Task[Any]") -> Any:
    """The task's result; the attempt that waits here may be cancelled at any moment, and the work goes on."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled():
            raise Unavailable("this service shut down before the operation was done") from None
        raise


class _Call:
    """Times one piece of work for logs and metrics."""

    def __init__(self, label: str) -> None:
        self._label, self._queued = label, time.monotonic()
        self._began: float | None = None
        metrics.OPERATIONS_RUNNING.labels(label).inc()

    def began(self) -> None:
        self._began = time.monotonic()
        metrics.OPERATION_WAIT_SECONDS.labels(self._label).observe(self._began - self._queued)

    def ended(self, outcome: str, error: Exception | None = None) -> None:
        now = time.monotonic()
        began = self._began if self._began is not None else now
        metrics.OPERATIONS_RUNNING.labels(self._label).dec()
        metrics.OPERATION_SECONDS.labels(self._label, outcome).observe(now - began)
        fields = {"outcome": outcome, "seconds": round(now - began, 4), "waited": round(began - self._queued, 4)}
        if error is None:
            log.info("call", **fields)
        else:
            unexpected = not isinstance(error, SextetError)
            log.warning("call", **fields, error=f"{type(error).__name__}: {error}", exc_info=unexpected)


def payload_digest(request: Any) -> bytes:
    """xxh3-128 over the request's type and deterministic bytes, without its `operation` and `profile`."""
    payload = type(request)()
    payload.CopyFrom(request)
    for beside in NO_PAYLOAD.intersection(payload.DESCRIPTOR.fields_by_name):
        payload.ClearField(beside)
    name = request.DESCRIPTOR.full_name.encode()
    return xxhash.xxh3_128_digest(name + b"\0" + payload.SerializeToString(deterministic=True))


def _key(operation: common_pb2.Operation) -> Key:
    named = operation.id
    for part in ("run", "name"):
        if not getattr(named, part):
            raise InvalidArgument(f"operation.id.{part} is empty: every mutating call names its operation")
    for part, value in (("id.step", named.step), ("epoch", operation.epoch)):
        if value < 0:
            raise InvalidArgument(f"operation.{part}={value} is negative")
    return Key(named.run, named.step, named.name, named.part)


def _prompts(request: Any) -> list[str]:
    """Uids of the prompts that a request's rows belong to, in their order."""
    blocks = request.inputs.blocks if "inputs" in request.DESCRIPTOR.fields_by_name else ()
    return list(dict.fromkeys(row.uid for block in blocks for row in block.rows))


def _show(key: Key) -> str:
    return f"operation {key.name} of step {key.step}" + (f", part {key.part}" if key.part else "")
