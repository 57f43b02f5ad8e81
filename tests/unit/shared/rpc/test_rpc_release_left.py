"""A run that is released by a caller that does not stay for it."""

import asyncio
from typing import Any

from shared.batch.store import BatchStore
from shared.gen.sextet.v1 import role_pb2
from shared.rpc.memory import unsettle
from shared.rpc.operations import Operations
from shared.rpc.role import ENGINE, RoleServicer
from tests.fakes.role import CONFIG_JSON, FakeBackend


async def test_what_a_run_has_on_disk_goes_with_it_before_it_is_configured_again() -> None:
    """Regression: when its caller left while the engine was busy, all of it stayed; and a later controller that went on
    with the run by then was told, for all its epoch, that the run was released already."""
    operations, busy, told = Operations(), asyncio.Event(), []
    settings: Any = None
    backend = FakeBackend()
    role = RoleServicer(settings, operations, BatchStore(1), backend)
    role.on_release = lambda run, step: told.append((run, step, backend.version()))
    computing = asyncio.create_task(operations.exclusively(ENGINE, lambda: asyncio.wait_for(busy.wait(), 60)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    releasing = asyncio.create_task(role.ReleaseRun(role_pb2.ReleaseRunRequest(run="r", epoch=1), None))
    request = role_pb2.ConfigureRequest(config_json=CONFIG_JSON)
    request.operation.id.run, request.operation.id.name, request.operation.epoch = "r", "configure", 2
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    configuring = asyncio.create_task(role.Configure(request, None))
    await asyncio.sleep(0)
    releasing.cancel()
    await asyncio.wait({releasing})
    busy.set()
    try:
        await computing
        await configuring
        assert told == [("r", None, -1)]
    finally:
        unsettle()
