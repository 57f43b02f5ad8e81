"""A dead engine that goes slowly, while the replica is configured again."""

import asyncio
from typing import Any

from services.rollout import beside
from shared.batch.store import BatchStore
from shared.gen.sextet.v1 import role_pb2
from shared.rpc.memory import unsettle
from shared.rpc.operations import Operations
from shared.rpc.role import RoleServicer
from tests.fakes.role import CONFIG_JSON, FakeBackend


class SlowToGo(FakeBackend):
    """Its release waits for `gone`."""

    def __init__(self) -> None:
        super().__init__()
        self.going, self.gone = asyncio.Event(), asyncio.Event()

    async def release(self, run: str) -> None:
        self.going.set()
        await self.gone.wait()


def configure(part: str) -> role_pb2.ConfigureRequest:
    request = role_pb2.ConfigureRequest(config_json=CONFIG_JSON)
    request.operation.id.run, request.operation.id.name, request.operation.id.part = "r", "configure", part
    return request


async def test_who_configures_before_the_dead_engine_is_gone_finds_it_ready() -> None:
    """Regression: it said "restarting" from then on, and was prepared again and again."""
    backend: Any = SlowToGo()
    settings: Any = None
    face = RoleServicer(settings, Operations(), BatchStore(1), backend)
    try:
        await face.Configure(configure("1"), None)
        replacing = asyncio.create_task(beside._replace(backend, face))
        await backend.going.wait()
        assert face.standing == "dead"
        await face.Configure(configure("2"), None)
        backend.gone.set()
        await replacing
        assert face.standing == ""
        await beside._replace(backend, face)
        assert face.standing == "restarting"
    finally:
        unsettle()
