"""A role with a fake backend: in this event loop (`fake_role`), or as a process (`python -m tests.fakes.role`)."""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from shared.config import RunConfig
from shared.gen.sextet.v1 import role_pb2_grpc
from shared.rpc.client import Connections
from shared.rpc.errors import Unimplemented
from shared.rpc.role import Configured, StagedState
from shared.rpc.run import RoleContext, RoleParts, run_role, serve_role
from shared.rpc.settings import ServiceSettings

TOKEN = "token-of-the-tests-0123456789"
CONFIG_JSON = """{"model": {"path": "m"}, "data": {"path": "d"}, "total_steps": 1, "reward": {"function": "a:b"}}"""
_numbers = itertools.count()


class FakeSettings(ServiceSettings):
    """Settings of the fake role."""

    role: str = "fake"
    configure_seconds: float = 0.0
    """How long Configure takes."""


@dataclass
class FakeBackend:
    """Remembers what it was asked for; its fault and version are set by the test."""

    seconds: float = 0.0
    calls: list[tuple[str, ...]] = field(default_factory=list)
    now_version: int = -1
    now_fault: str = ""

    async def configure(self, config: RunConfig, run: str, checkpoint: str | None) -> Configured:
        self.calls.append(("configure", run, checkpoint or ""))
        await asyncio.sleep(self.seconds)
        self.now_version = 0
        return Configured(0, {"engine": "fake"})

    async def stage(self) -> StagedState:
        raise Unimplemented("the fake has no state")

    async def release(self, run: str) -> None:
        self.calls.append(("release", run))
        self.now_version = -1

    def version(self) -> int:
        return self.now_version

    def fault(self) -> str:
        return self.now_fault


@dataclass(frozen=True)
class RunningRole:
    """A served role and a client of it."""

    context: RoleContext[Any]
    parts: RoleParts
    connections: Connections
    stop: asyncio.Event
    served: "asyncio.Task[tuple[int, bool]]"

    @property
    def endpoint(self) -> str:
        return self.context.store.endpoint

    @property
    def channel(self) -> grpc.aio.Channel:
        return self.connections.channel(self.endpoint)

    @property
    def role(self) -> Any:
        """A RoleService stub."""
        return role_pb2_grpc.RoleServiceStub(self.channel)


def build_fake(context: RoleContext[FakeSettings]) -> RoleParts:
    return RoleParts(FakeBackend(context.settings.configure_seconds), [], [])


@contextlib.asynccontextmanager
async def fake_role(
    build: Callable[[RoleContext[Any]], RoleParts] = build_fake,
    settings_type: type[ServiceSettings] = FakeSettings,
    **settings: Any,
) -> AsyncIterator[RunningRole]:
    """Serves a role over loopback with an in-memory store of its own (or `redis_url=`); stops it afterwards."""
    values = {"token": TOKEN, "metrics_port": -1, "redis_url": f"memory://{next(_numbers)}", "drain_timeout": 5}
    data = tempfile.TemporaryDirectory()
    values["data_dir"] = data.name
    made: list[tuple[RoleContext[Any], RoleParts]] = []

    def remember(context: RoleContext[Any]) -> RoleParts:
        made.append((context, build(context)))
        return made[0][1]

    started, stop = asyncio.Event(), asyncio.Event()
    served = asyncio.create_task(
        serve_role(settings_type.model_validate({**values, **settings}), remember, started=started, stop=stop)
    )
    waiting = asyncio.create_task(started.wait())
    await asyncio.wait([served, waiting], timeout=60, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not started.is_set():
        raise RuntimeError(f"the role did not start: {served.result() if served.done() else 'timeout'}")
    connections = Connections(TOKEN)
    try:
        yield RunningRole(*made[0], connections, stop, served)
    finally:
        await connections.close()
        stop.set()
        await asyncio.wait_for(served, 60)
        data.cleanup()


if __name__ == "__main__":
    run_role(FakeSettings, build_fake)
