"""Checkpoints that are damaged: an older one is taken, and a run that has none left does not begin anew by itself."""

import asyncio
import json
import shutil
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from services.controller.records import Record
from shared.rpc.errors import FailedPrecondition
from tests.fakes.sextet import FakeRole
from tests.unit.services.controller.conftest import ALL, Controller, failing
from tests.unit.services.controller.test_failures import exported, outcome, saved, undisturbed

__all__ = ["undisturbed"]


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("critic/state.json", "{", "critic is damaged"),
        ("critic/state.json", "of step 1", "critic' is of version 1, and its run's was at 2"),
        ("run.json", "{", "step_2/run.json is damaged"),
        ("run.json", "[]", "step_2/run.json is damaged"),
    ],
)
async def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    fakes: Any, controller: Any, undisturbed: Any, file: str, content: str, why: str
) -> None:
    await fakes.start(*ALL)
    actor, root = fakes["actor-0"], controller.root / "r" / "checkpoints"

    async def damage_and_restart(request: Any) -> None:
        if request.operation.id.step == 3:
            actor.hooks.clear()
            await until_saved(controller, 2)
            older = (root / "step_1" / file).read_text()
            (root / "step_2" / file).write_text(older if content == "of step 1" else content)
            await actor.kill()
            tasks.append(asyncio.create_task(actor.start()))
            await asyncio.sleep(60)

    tasks: list[Any] = []
    actor.hooks["update"] = damage_and_restart
    assert await outcome(controller, fakes, checkpoint__save_interval=1, checkpoint__keep=5) == undisturbed
    told = await controller.events("r")
    assert any("goes on from step 1" in message for _, _, message in told)
    (warning,) = (said for kind, _, said in told if kind == "warning" and "step 2 can't be used" in said)
    assert why in warning
    # And written anew.
    assert json.loads((root / "step_2" / file).read_text())


async def until_saved(controller: Controller, step: int) -> None:
    """The checkpoint is written, which happens while the next step is played, and the saver is done with it."""
    async with aclosing(controller.runs.watch("r", "")) as events:
        async for event in events:
            if (event.kind, event.step) == ("checkpoint", step):
                return


async def killed_after_step_2(
    fakes: Any, controller: Controller, before_return: Callable[[FakeRole, Path], None]
) -> Record:
    """The run, once it has come to an end of its own, whose actor died in step 3 and came back after that was done."""
    await fakes.start(*ALL)
    actor, root, tasks = fakes["actor-0"], controller.root / "r" / "checkpoints", []

    async def die(request: Any) -> None:
        if request.operation.id.step == 3:
            actor.hooks.clear()
            await until_saved(controller, 2)
            before_return(actor, root)
            await actor.kill()
            tasks.append(asyncio.create_task(actor.start()))
            await asyncio.sleep(60)

    actor.hooks["update"] = die
    await controller.create("r", checkpoint__save_interval=1, checkpoint__keep=5)
    return await controller.over("r")


async def test_a_role_that_refuses_for_another_reason_gets_no_older_checkpoint(
    fakes: Any, controller: Controller, undisturbed: Any
) -> None:
    def short(actor: FakeRole, root: Path) -> None:
        actor.hooks["configure"] = failing(lambda: FailedPrecondition("out of memory: 7 bytes are missing"), 1)

    record = await killed_after_step_2(fakes, controller, short)
    assert record.state == "failed"
    assert "out of memory: 7 bytes are missing" in record.reason
    assert not any("can't be used" in message for _, _, message in await controller.events("r"))
    await controller.runs.resume("r")
    await controller.over("r")
    assert (exported(record.directory), saved(record.directory, 3)) == undisturbed
    assert any("goes on from step 2" in message for _, _, message in await controller.events("r"))


async def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew_by_itself(
    fakes: Any, controller: Controller, undisturbed: Any
) -> None:
    def damage(actor: FakeRole, root: Path) -> None:
        for step in (1, 2):
            (root / f"step_{step}" / "run.json").write_text("{")

    record = await killed_after_step_2(fakes, controller, damage)
    assert record.state == "failed"
    for step in (1, 2):
        assert f"step_{step}/run.json is damaged" in record.reason
    shutil.rmtree(controller.root / "r" / "checkpoints")
    await controller.runs.resume("r")
    await controller.over("r")
    assert (exported(record.directory), saved(record.directory, 3)) == undisturbed
