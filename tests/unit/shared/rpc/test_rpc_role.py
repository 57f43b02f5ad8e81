"""RoleService: configure, release, describe, and what they do to operations and batches."""

import asyncio
import gc
import json
import weakref
from typing import Any

import numpy as np
import pytest

from shared.batch.block import Block, Ragged, RowKey
from shared.gen.sextet.v1 import role_pb2
from shared.rpc import errors
from shared.rpc.client import call
from shared.rpc.role import Configured
from tests.fakes.role import CONFIG_JSON, FakeBackend, RunningRole, fake_role


def configure(run: str = "r", epoch: int = 1, part: str = "", checkpoint: str = "") -> role_pb2.ConfigureRequest:
    request = role_pb2.ConfigureRequest(config_json=CONFIG_JSON, checkpoint=checkpoint)
    request.operation.id.run, request.operation.id.name, request.operation.id.part = run, "configure", part
    request.operation.epoch = epoch
    return request


async def describe(role: RunningRole) -> role_pb2.DescribeResponse:
    return await call(role.role.Describe, role_pb2.DescribeRequest(), timeout=5)


async def do(role: RunningRole, run: str, step: int, epoch: int, work: Any) -> Any:
    """An operation of a step, as a servicer of the role would run it."""
    request = role_pb2.SaveCheckpointRequest(directory="d")
    request.operation.id.run, request.operation.id.step, request.operation.id.name = run, step, "work"
    request.operation.epoch = epoch
    return await role.context.operations.run(request, work)


def hold_block(role: RunningRole, run: str, step: int) -> None:
    column = Ragged(np.zeros(100, np.float32), np.array([100], np.uint32))
    role.context.store.put(Block((RowKey("u", 0),), {"score": column}), run=run, step=step, tokens=[1])


async def test_configure_describe_release(role: RunningRole) -> None:
    answer = await call(role.role.Configure, configure(checkpoint="some/dir"), timeout=5)
    assert (answer.version, answer.facts) == (0, {"engine": "fake"})
    described = await describe(role)
    assert (described.run, described.epoch, described.version) == ("r", 1, 0)
    assert not described.HasField("last_applied"), "a loaded state is not a change of it"
    await call(role.role.ReleaseRun, role_pb2.ReleaseRunRequest(run="r", epoch=1), timeout=5)
    await call(role.role.ReleaseRun, role_pb2.ReleaseRunRequest(run="r", epoch=1), timeout=5)
    assert role.parts.backend.calls == [("configure", "r", "some/dir"), ("release", "r")]
    assert (await describe(role)).run == ""


class Loop:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("verb", ["configure", "release"])
async def test_what_is_loaded_is_out_of_the_collectors_sight_until_it_is_let_go(
    role: RunningRole, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Loop()
    gone = weakref.ref(model)
    await call(role.role.Configure, configure(), timeout=5)
    assert gc.get_freeze_count() > 1000
    assert not any(known is model for known in gc.get_objects())
    del model

    async def collect(*_: Any) -> Configured:
        gc.collect()
        return Configured(0)

    monkeypatch.setattr(role.parts.backend, verb, collect)
    if verb == "configure":
        await call(role.role.Configure, configure(part="again"), timeout=5)
    else:
        await call(role.role.ReleaseRun, role_pb2.ReleaseRunRequest(run="r", epoch=1), timeout=5)
    assert gone() is None


async def test_another_run_takes_over_and_the_old_one_is_fenced(role: RunningRole) -> None:
    await call(role.role.Configure, configure("old", 1), timeout=5)
    hold_block(role, "old", 1)
    await call(role.role.Configure, configure("new", 2), timeout=5)
    assert role.parts.backend.calls == [("configure", "old", ""), ("release", "old"), ("configure", "new", "")]
    assert (await describe(role)).held_bytes == 0
    with pytest.raises(errors.StaleEpoch):
        await call(role.role.ReleaseRun, role_pb2.ReleaseRunRequest(run="old", epoch=1), timeout=5)
    assert (await describe(role)).run == "new"


async def test_a_step_is_released_with_its_batches_and_results(role: RunningRole) -> None:
    await call(role.role.Configure, configure(), timeout=5)
    for step in (1, 2, 3):
        hold_block(role, "r", step)
    one = (await describe(role)).held_bytes // 3
    released = await call(role.role.ReleaseStep, role_pb2.ReleaseStepRequest(run="r", epoch=1, step=2), timeout=5)
    assert released.bytes == 2 * one
    again = await call(role.role.ReleaseStep, role_pb2.ReleaseStepRequest(run="r", epoch=1, step=2), timeout=5)
    assert again.bytes == 0
    assert (await describe(role)).held_bytes == one


async def test_a_restored_run_does_its_steps_again(role: RunningRole) -> None:
    results = iter(range(10))

    async def work() -> role_pb2.SaveCheckpointResponse:
        return role_pb2.SaveCheckpointResponse(version=next(results))

    await call(role.role.Configure, configure(), timeout=5)
    assert (await do(role, "r", 1, 1, work)).version == 0
    assert (await do(role, "r", 1, 2, work)).version == 0
    await call(role.role.Configure, configure(epoch=2, part="2", checkpoint="c"), timeout=5)
    assert (await do(role, "r", 1, 2, work)).version == 1


async def test_batches_of_work_that_outlives_its_run_are_freed(role: RunningRole) -> None:
    await call(role.role.Configure, configure(), timeout=5)
    gate = asyncio.Event()

    async def work() -> role_pb2.SaveCheckpointResponse:
        await gate.wait()
        hold_block(role, "r", 1)
        return role_pb2.SaveCheckpointResponse()

    working = asyncio.create_task(do(role, "r", 1, 1, work))
    await asyncio.sleep(0.01)
    await call(role.role.ReleaseRun, role_pb2.ReleaseRunRequest(run="r", epoch=1), timeout=5)
    gate.set()
    await working
    assert (await describe(role)).held_bytes == 0


class Failing(FakeBackend):
    async def configure(self, config: Any, run: str, checkpoint: str | None) -> Configured:
        if not self.calls:
            self.calls.append(("failed",))
            raise errors.InvalidArgument(f"model.path={config.model.path!r} does not exist")
        return await super().configure(config, run, checkpoint)


async def test_a_failed_configure_leaves_no_run_and_may_be_tried_again() -> None:
    from shared.rpc.run import RoleParts

    async with fake_role(build=lambda context: RoleParts(Failing(), [], [])) as role:
        with pytest.raises(errors.InvalidArgument, match=r"model\.path='m' does not exist"):
            await call(role.role.Configure, configure(), timeout=5)
        assert (await describe(role)).run == ""
        assert (await call(role.role.Configure, configure(), timeout=5)).version == 0
        assert (await describe(role)).run == "r"


async def test_config_must_be_json_and_not_a_path(role: RunningRole, tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("secret: 1")
    request = configure()
    request.config_json = str(path)
    with pytest.raises(errors.InvalidArgument, match="not a JSON object"):
        await call(role.role.Configure, request, timeout=5)


@pytest.mark.parametrize("method", ["ReleaseStep", "ReleaseRun"])
async def test_releases_name_their_run(role: RunningRole, method: str) -> None:
    request = role_pb2.ReleaseStepRequest() if method == "ReleaseStep" else role_pb2.ReleaseRunRequest()
    with pytest.raises(errors.InvalidArgument, match="run is empty"):
        await call(getattr(role.role, method), request, timeout=5)


async def test_a_configure_that_hangs_ends_the_process(monkeypatch: Any) -> None:
    ended: list[bool] = []
    monkeypatch.setattr("shared.rpc.role.end_process", lambda: ended.append(True))
    async with fake_role(configure_seconds=30) as role:
        request = configure()
        request.config_json = json.dumps({**json.loads(request.config_json), "recovery": {"call_timeout": 0.2}})
        with pytest.raises(errors.Unavailable, match=r"recovery\.call_timeout=0\.2 s"):
            await call(role.role.Configure, request, timeout=5)
    assert ended
