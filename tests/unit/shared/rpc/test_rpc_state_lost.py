"""A state that is lost while work goes on: the batches that were made with it stay."""

import asyncio
from typing import Any

import numpy as np
import pytest

from shared.batch.block import Block, Ragged, RowKey
from shared.batch.store import BatchStore
from shared.gen.sextet.v1 import rollout_pb2
from shared.rpc.errors import FailedPrecondition
from shared.rpc.operations import Operations
from shared.rpc.role import RoleServicer
from tests.fakes.role import FakeBackend


async def test_work_that_ends_after_its_state_was_lost_takes_no_batch_with_it() -> None:
    """Regression: a rollout whose engine died over one call's rows let go of all blocks of its run."""
    operations, store, dead = Operations(), BatchStore(1 << 20), asyncio.Event()
    settings: Any = None
    role = RoleServicer(settings, operations, store, FakeBackend())
    column = Ragged(np.zeros(100, np.float32), np.array([100], np.uint32))
    store.put(Block((RowKey("u", 0),), {"score": column}), run="r", step=1, tokens=[1])

    async def work() -> Any:
        await dead.wait()
        raise FailedPrecondition("the engine is dead")

    request = rollout_pb2.GenerateRequest()
    request.operation.id.run, request.operation.id.step, request.operation.id.name = "r", 2, "rollout.generate"
    call = asyncio.create_task(operations.run(request, work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert operations.running()
    role._run = "r"
    assert role.lose() == "r"
    dead.set()
    with pytest.raises(FailedPrecondition, match="dead"):
        await call
    assert store.held_bytes > 400
    assert not operations.running()
