"""RoleService, the same for every role: configure, describe, save, release."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from shared.config import RunConfig
from shared.config_loading import parse_config
from shared.gen.sextet.v1 import role_pb2, role_pb2_grpc
from shared.rpc.errors import FailedPrecondition, GroupEnds, InvalidArgument, Unavailable
from shared.rpc.history import Applied
from shared.rpc.memory import settle, unsettle
from shared.rpc.operations import Operations
from shared.rpc.ranks import Alone, Handlers, Ranks
from shared.rpc.server import EXIT_WEDGED
from shared.rpc.settings import ServiceSettings
from shared.state.registry import ReplicaState

if TYPE_CHECKING:
    from shared.batch.store import BatchStore

log = structlog.get_logger()

ENGINE = "engine"
"""The lane of everything that computes or changes weights."""
WRITING = "writing"
"""The lane of what is done with the copy of the state: beside the engine's."""


@dataclass(frozen=True)
class Configured:
    """A configured backend.

    Attributes:
        version: the optimizer step of its weights.
        facts: what the controller needs or shows.
        last_applied: the operation whose result the loaded state is, as its checkpoint names it.
    """

    version: int
    facts: Mapping[str, str] = field(default_factory=dict)
    last_applied: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A written checkpoint: xxh3-128 (hex) over its manifest, bytes written, optimizer step."""

    digest: str
    bytes: int
    version: int


class StagedState(Protocol):
    """A copy of a role's state."""

    @property
    def version(self) -> int:
        """Its optimizer step."""
        ...

    async def save(self, directory: str) -> SavedCheckpoint:
        """Writes the copy, completely or not at all, to a directory or `s3://...`; may be called again."""
        ...


class RoleBackend(Protocol):
    """What every role's backend has, besides the verbs of its role."""

    async def configure(self, config: RunConfig, run: str, checkpoint: str | None) -> Configured:
        """Gets ready for a run, from a checkpoint directory if given; replaces whatever was configured.

        Raises:
            DamagedCheckpoint: the run may use an older one; nothing else that is raised makes it do that.
        """
        ...

    async def stage(self) -> StagedState:
        """Copies the state, over the copy before; raises Unimplemented when the role has none."""
        ...

    async def release(self, run: str) -> None:
        """Lets go of a run's models and data."""
        ...

    def version(self) -> int:
        """Optimizer step of the weights; -1: none."""
        ...

    def fault(self) -> str:
        """Why it can't serve; "" when it can."""
        ...


class RoleServicer(role_pb2_grpc.RoleServiceServicer):
    """See role.proto.

    Args:
        incarnation: of this process; the registry shows the same.
        ranks: the processes of this replica.

    Attributes:
        standing: "dead" or "restarting" while the state of the run is lost; "" otherwise.
        facts: for the registry, whatever run is configured.
        on_release: told (in a thread) up to which step a run does not go back any more; None: it is over.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        operations: Operations,
        store: BatchStore,
        backend: RoleBackend,
        incarnation: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        self._settings, self._operations, self._store, self._backend = settings, operations, store, backend
        self._incarnation, self._ranks = incarnation, ranks or Alone()
        self._run = ""
        self._ready = False
        self._facts: dict[str, str] = {}
        self._staged: StagedState | None = None
        self._saving: set[asyncio.Task[SavedCheckpoint]] = set()
        self.standing = ""
        self.facts: dict[str, str] = {}
        self.on_release: Callable[[str, int | None], None] = lambda run, saved_step: None
        operations.on_late_end = store.release

    async def Configure(self, request: role_pb2.ConfigureRequest, context: Any) -> role_pb2.ConfigureResponse:
        async def work() -> role_pb2.ConfigureResponse:
            return await self._ranks.together(request, lambda: self._configure(request))

        return await self._operations.run(request, work, lane=ENGINE)

    async def StageCheckpoint(
        self, request: role_pb2.StageCheckpointRequest, context: Any
    ) -> role_pb2.StageCheckpointResponse:
        async def work() -> role_pb2.StageCheckpointResponse:
            began = time.perf_counter()
            # In the other lane, too: what is being written can't be overwritten.
            stage = partial(self._ranks.together, request, lambda: self._stage(request))
            await self._operations.exclusively(WRITING, stage)
            version = self._copy(None).version
            return role_pb2.StageCheckpointResponse(version=version, seconds=time.perf_counter() - began)

        return await self._operations.run(request, work, lane=ENGINE)

    async def SaveCheckpoint(
        self, request: role_pb2.SaveCheckpointRequest, context: Any
    ) -> role_pb2.SaveCheckpointResponse:
        async def work() -> role_pb2.SaveCheckpointResponse:
            # The ranks begin it together, and go on with other commands.
            saved = await (await self._ranks.together(request, lambda: self._begin_save(request)))
            return role_pb2.SaveCheckpointResponse(digest=saved.digest, bytes=saved.bytes, version=saved.version)

        return await self._operations.run(request, work, lane=WRITING)

    async def Describe(self, request: role_pb2.DescribeRequest, context: Any) -> role_pb2.DescribeResponse:
        if self._ranks.end:
            # Whoever was told that the group ends must not find it alive.
            raise GroupEnds(self._ranks.end)
        return role_pb2.DescribeResponse(
            role=self._settings.role,
            replica=self._settings.replica,
            incarnation=self._incarnation,
            # Only what is loaded counts: a controller takes a run named here as one that need not be configured.
            run=self._run if self._ready else "",
            epoch=self._operations.epoch,
            version=self._backend.version(),
            running=self._operations.running(),
            last_applied=self._operations.last_applied,
            held_bytes=self._store.held_bytes,
            fault=self._backend.fault(),
        )

    async def ReleaseStep(self, request: role_pb2.ReleaseStepRequest, context: Any) -> role_pb2.ReleaseStepResponse:
        self._operations.observe_epoch(request.epoch)
        self._operations.forget(_named(request.run), request.step)
        # At once: a disk may be slow, and the caller leave.
        freed = self._store.release(request.run, request.step)
        saved = request.saved_step if request.HasField("saved_step") else request.step
        await asyncio.to_thread(self.on_release, request.run, saved)
        return role_pb2.ReleaseStepResponse(bytes=freed)

    async def ReleaseRun(self, request: role_pb2.ReleaseRunRequest, context: Any) -> role_pb2.ReleaseRunResponse:
        self._operations.observe_epoch(request.epoch)
        self._operations.forget(_named(request.run))

        async def let_go() -> None:
            await self._ranks.together(request, lambda: self._let_go(request.run))
            # Not after it: whoever asked may have left, and the run may be configured again by then.
            await asyncio.to_thread(self.on_release, request.run, None)

        await self._operations.exclusively(ENGINE, let_go)
        return role_pb2.ReleaseRunResponse()

    @property
    def handlers(self) -> Handlers:
        """What every rank of this replica does."""
        return {
            role_pb2.ConfigureRequest: self._configure,
            role_pb2.StageCheckpointRequest: self._stage,
            role_pb2.SaveCheckpointRequest: self._begin_save,
            role_pb2.ReleaseRunRequest: lambda request: self._let_go(request.run),
        }

    async def _configure(self, request: role_pb2.ConfigureRequest) -> role_pb2.ConfigureResponse:
        config = parse_config(request.config_json)
        run = request.operation.id.run
        if self._run and self._run != run:
            # It may be paused: what it has on disk stays.
            self._operations.forget(self._run)
            await self._let_go(self._run)
        unsettle()
        # Set first: when it fails half-way, a release must still clean up.
        self._run, self._ready, self.standing = run, False, ""
        self._staged = None
        configured = await self._configured(config, run, request.checkpoint or None)
        self._operations.restart(run)
        applied = Applied.from_fields(configured.last_applied) if configured.last_applied else None
        # A checkpoint of another run: nobody asks for that one's operations here.
        if applied and applied.id.run == run:
            self._operations.restore(applied)
        self._ready, self._facts = True, dict(configured.facts)
        settle()
        return role_pb2.ConfigureResponse(version=configured.version, facts=configured.facts)

    async def _configured(self, config: RunConfig, run: str, checkpoint: str | None) -> Configured:
        seconds = config.recovery.call_timeout
        try:
            return await asyncio.wait_for(self._backend.configure(config, run, checkpoint), seconds)
        except TimeoutError:
            # A thread that hangs in loading holds the lane for ever: whoever keeps this replica starts it anew.
            log.critical("configure hangs: this process ends", run=run, seconds=seconds)
            end_process()
            raise Unavailable(f"configure did not end within recovery.call_timeout={seconds:g} s") from None

    async def _stage(self, request: role_pb2.StageCheckpointRequest) -> None:
        self._staged = None
        self._staged = await self._backend.stage()

    async def _begin_save(self, request: role_pb2.SaveCheckpointRequest) -> asyncio.Task[SavedCheckpoint]:
        if not request.directory:
            raise InvalidArgument("directory is empty: name the checkpoint's directory")
        task = asyncio.create_task(self._copy(request.version).save(request.directory))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)
        # Ranks above 0 have nobody to tell; all of them failed alike.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _copy(self, version: int | None) -> StagedState:
        held = None if self._staged is None else self._staged.version
        if self._staged is None or version not in (None, held):
            wanted = "" if version is None else f" of version {version}"
            raise FailedPrecondition(f"there is no copy of the state{wanted}, but {held}: call StageCheckpoint first")
        return self._staged

    def state(self) -> ReplicaState:
        """For the registry."""
        running = len(self._operations.running())
        facts = {**self.facts, **self._facts}
        return ReplicaState(self._run, self._backend.version(), running, self._backend.fault(), facts, self.standing)

    def lose(self) -> str:
        """The run's state is lost, the batches made with it are not: it has to be configured anew. Answers the run."""
        # What was done has to be done again when it is asked for again.
        self._operations.forget(self._run)
        self._operations.restart(self._run)
        self._ready, self.standing = False, "dead"
        return self._run

    async def _let_go(self, run: str) -> None:
        self._store.release(run, None)
        if self._run == run:
            unsettle()
            await self._backend.release(run)
            self._run, self._ready, self._facts, self.standing = "", False, {}, ""
            self._staged = None


def end_process() -> None:
    """Ends this process at once, whatever its threads do."""
    sys.stderr.flush()
    os._exit(EXIT_WEDGED)


def _named(run: str) -> str:
    if not run:
        raise InvalidArgument("run is empty")
    return run
