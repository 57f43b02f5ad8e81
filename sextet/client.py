"""The controller from Python: `Client` blocks, `AsyncClient` awaits. Both speak gRPC and need no torch.

Messages are those of controller.proto (`Run`, `RunEvent`, `ServiceInfo`). Failures are the errors of shared.rpc.errors:
InvalidArgument (a configuration, in words that name the key), NotFound, FailedPrecondition, Unauthenticated,
Unavailable and DeadlineExceeded.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

from sextet.endpoint import find_controller
from shared.config import RunConfig, dump_config
from shared.config_loading import load_config
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.gen.sextet.v1 import controller_pb2_grpc
from shared.rpc.client import Connections, call, stream
from shared.rpc.errors import DeadlineExceeded, Unavailable
from shared.rpc.tls import load_tls
from shared.rpc.token import client_token

Config = RunConfig | Mapping[str, Any] | str | Path
T = TypeVar("T")

CALL_SECONDS = 30.0
SLOW_SECONDS = 3700.0
"""Checkpoints and profiles wait for steps; removing replicas waits until they have drained."""
WATCH_SECONDS = 600.0
RETRY_SECONDS = 60.0
"""How long a controller may be away while a run is watched."""
THERE_SECONDS = 30.0
"""A stream that lasted so long had a controller, though nothing happened: no attempt without one takes half of it."""


class AsyncClient:
    """The controller's methods as coroutines; use as `async with AsyncClient() as client:`.

    Args:
        endpoint: host:port; default: SEXTET_CONTROLLER, else the services of this directory.
        token: default: SEXTET_TOKEN, SEXTET_TOKEN_FILE, else this user's token.
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        self.endpoint = endpoint or find_controller()
        self._connections = Connections(token or client_token(), tls=load_tls("client"))
        self._stub = controller_pb2_grpc.ControllerServiceStub(self._connections.channel(self.endpoint))
        self.when_unavailable: Callable[[], None] = lambda: None
        """Asked while `watch` waits for the controller to come back; raises when it can't."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection."""
        await self._connections.close()

    async def create_run(self, config: Config, overrides: Sequence[str] = (), id: str = "") -> pb.Run:
        """Queues a run.

        Args:
            config: a file, a mapping or a RunConfig.
            overrides: `actor.optimizer.lr=1e-6` and the like.
            id: made up when empty; the same id again creates nothing new.

        Raises:
            ConfigError: the configuration can't be used.
        """
        loaded = config if isinstance(config, RunConfig) and not overrides else load_config(_tree(config), overrides)
        # Made here, so that trying again after a lost answer starts no second run.
        id = id or run_id()
        request = pb.CreateRunRequest(config_json=dump_config(loaded), id=id)
        return (await call(self._stub.CreateRun, request, timeout=CALL_SECONDS)).run

    async def get_run(self, id: str) -> pb.Run:
        """One run."""
        return (await call(self._stub.GetRun, pb.GetRunRequest(id=id), timeout=CALL_SECONDS)).run

    async def list_runs(self) -> list[pb.Run]:
        """All runs, the newest first."""
        return list((await call(self._stub.ListRuns, pb.ListRunsRequest(), timeout=CALL_SECONDS)).runs)

    async def watch(self, id: str, after: str = "") -> AsyncIterator[pb.RunEvent]:
        """A run's events after a cursor, until it is over; goes on where it was when the controller comes back."""
        lost_at = None
        while True:
            began = time.monotonic()
            try:
                request = pb.WatchRunRequest(id=id, after=after)
                async for response in stream(self._stub.WatchRun, request, timeout=WATCH_SECONDS):
                    after, lost_at = response.event.cursor, None
                    yield response.event
                return
            except DeadlineExceeded:
                continue
            except Unavailable:
                self.when_unavailable()
                if lost_at is None or time.monotonic() - began > THERE_SECONDS:
                    lost_at = time.monotonic()
                if time.monotonic() - lost_at > RETRY_SECONDS:
                    raise
                await asyncio.sleep(0.5)

    async def pause(self, id: str) -> pb.Run:
        """Pauses after the step in progress."""
        return (await call(self._stub.PauseRun, pb.PauseRunRequest(id=id), timeout=CALL_SECONDS)).run

    async def resume(self, id: str) -> pb.Run:
        """Goes on with a paused run, or with a failed one from its last checkpoint."""
        return (await call(self._stub.ResumeRun, pb.ResumeRunRequest(id=id), timeout=CALL_SECONDS)).run

    async def cancel(self, id: str) -> pb.Run:
        """Ends a run now."""
        return (await call(self._stub.CancelRun, pb.CancelRunRequest(id=id), timeout=CALL_SECONDS)).run

    async def checkpoint(self, id: str) -> tuple[str, int]:
        """Saves after the step in progress: directory and step."""
        saved = await call(self._stub.CheckpointRun, pb.CheckpointRunRequest(id=id), timeout=SLOW_SECONDS)
        return saved.directory, saved.step

    async def profile(self, id: str, role: str = "actor", steps: int = 1) -> list[pb.CallProfile]:
        """Records the calls of a role (actor, critic, reference) in the next steps: a trace file of each rank."""
        request = pb.ProfileRunRequest(id=id, role=role, steps=steps)
        return list((await call(self._stub.ProfileRun, request, timeout=SLOW_SECONDS)).calls)

    async def services(self) -> list[pb.ServiceInfo]:
        """Registered services, by role."""
        return list((await call(self._stub.ListServices, pb.ListServicesRequest(), timeout=CALL_SECONDS)).services)

    async def scale(self, role: str, replicas: int, at_once: bool = False) -> tuple[int, int]:
        """Replicas of a role before, and wanted now; answers when so many are listed, or `at_once`."""
        request = pb.ScaleRequest(role=role, replicas=replicas, at_once=at_once)
        scaled = await call(self._stub.Scale, request, timeout=SLOW_SECONDS)
        return scaled.before, scaled.replicas


class Client:
    """The controller's methods, blocking; may be used from any thread. Arguments as for AsyncClient."""

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        endpoint, token = endpoint or find_controller(), token or client_token()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sextet-client", daemon=True)
        self._thread.start()
        self._client = self._wait(_made(endpoint, token))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """host:port of the controller."""
        return self._client.endpoint

    @property
    def when_unavailable(self) -> Callable[[], None]:
        """See AsyncClient.when_unavailable."""
        return self._client.when_unavailable

    @when_unavailable.setter
    def when_unavailable(self, check: Callable[[], None]) -> None:
        self._client.when_unavailable = check

    def close(self) -> None:
        """Closes the connection."""
        if self._thread.is_alive():
            self._wait(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def create_run(self, config: Config, overrides: Sequence[str] = (), id: str = "") -> pb.Run:
        """See AsyncClient.create_run."""
        return self._wait(self._client.create_run(config, overrides, id))

    def get_run(self, id: str) -> pb.Run:
        """One run."""
        return self._wait(self._client.get_run(id))

    def list_runs(self) -> list[pb.Run]:
        """All runs, the newest first."""
        return self._wait(self._client.list_runs())

    def watch(self, id: str, after: str = "") -> Iterator[pb.RunEvent]:
        """See AsyncClient.watch."""
        events, turn = self._client.watch(id, after), asyncio.Lock()
        try:
            while (event := self._wait(_next(events, turn))) is not None:
                yield event
        finally:
            self._wait(_closed(events, turn))

    def pause(self, id: str) -> pb.Run:
        """Pauses after the step in progress."""
        return self._wait(self._client.pause(id))

    def resume(self, id: str) -> pb.Run:
        """Goes on with a paused run, or with a failed one from its last checkpoint."""
        return self._wait(self._client.resume(id))

    def cancel(self, id: str) -> pb.Run:
        """Ends a run now."""
        return self._wait(self._client.cancel(id))

    def checkpoint(self, id: str) -> tuple[str, int]:
        """Saves after the step in progress: directory and step."""
        return self._wait(self._client.checkpoint(id))

    def profile(self, id: str, role: str = "actor", steps: int = 1) -> list[pb.CallProfile]:
        """Records the calls of a role (actor, critic, reference) in the next steps: a trace file of each rank."""
        return self._wait(self._client.profile(id, role, steps))

    def services(self) -> list[pb.ServiceInfo]:
        """Registered services, by role."""
        return self._wait(self._client.services())

    def scale(self, role: str, replicas: int, at_once: bool = False) -> tuple[int, int]:
        """Replicas of a role before, and wanted now."""
        return self._wait(self._client.scale(role, replicas, at_once))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C while waiting: the call must not go on behind our back.
            future.cancel()
            raise


def run_id() -> str:
    """An id for a new run. Who has it before the run is made can cancel it when Ctrl-C cuts off the answer."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _tree(config: Config) -> Mapping[str, Any] | str | Path:
    return config.model_dump(mode="json") if isinstance(config, RunConfig) else config


async def _made(endpoint: str, token: str) -> AsyncClient:
    return AsyncClient(endpoint, token)


# After Ctrl-C the cancelled _next may still be unwinding when _closed begins: they take turns.
async def _next(events: AsyncIterator[pb.RunEvent], turn: asyncio.Lock) -> pb.RunEvent | None:
    async with turn:
        return await anext(events, None)


async def _closed(events: Any, turn: asyncio.Lock) -> None:
    async with turn:
        await events.aclose()
