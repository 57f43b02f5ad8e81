"""Callers that leave, disks and engines that hang, while a run or a step is released or a role ends."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared.batch.block import Block, Ragged, RowKey
from shared.batch.store import BatchStore
from shared.gen.sextet.v1 import role_pb2
from shared.rpc import run
from shared.rpc.memory import unsettle
from shared.rpc.operations import Operations
from shared.rpc.role import ENGINE, RoleServicer
from shared.rpc.run import RoleParts
from tests.fakes.role import CONFIG_JSON, FakeBackend, build_fake, fake_role


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


async def test_a_steps_batches_go_whatever_becomes_of_its_files() -> None:
    """Regression: with a disk that hangs every caller left before they went, until no batch had room any more."""
    settings: Any = None
    store, going, gone = BatchStore(1 << 20), asyncio.Event(), threading.Event()
    role, loop = RoleServicer(settings, Operations(), store, FakeBackend()), asyncio.get_running_loop()

    def hang(run: str, step: int | None) -> None:
        loop.call_soon_threadsafe(going.set)
        gone.wait(60)

    role.on_release = hang
    column = Ragged(np.zeros(100, np.float32), np.array([100], np.uint32))
    store.put(Block((RowKey("u", 0),), {"score": column}), run="r", step=1, tokens=[1])
    releasing = asyncio.create_task(role.ReleaseStep(role_pb2.ReleaseStepRequest(run="r", epoch=1, step=1), None))
    await going.wait()
    releasing.cancel()
    await asyncio.wait({releasing})
    gone.set()
    assert store.held_bytes == 0


async def test_a_role_whose_engine_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was waited for without end, and an orphan of a launcher that had ended was left behind."""
    monkeypatch.setattr(run, "_STOPPED_SECONDS", 0.1)

    def build(context: Any) -> RoleParts:
        return replace(build_fake(context), on_stopped=asyncio.Event().wait)

    async with fake_role(build) as role:
        role.stop.set()
        assert await asyncio.wait_for(role.served, 30) == (0, False)
