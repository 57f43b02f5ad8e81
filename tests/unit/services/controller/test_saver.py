"""Checkpoints are written beside the next steps, one at a time; a step changes nothing before the state is copied."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.controller import checkpoints
from services.controller.journal import Position
from services.controller.saver import Saver
from shared.places import Local
from shared.rpc.errors import FailedPrecondition
from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller, failing
from tests.unit.services.controller.test_failures import exported, outcome, saved, undisturbed

__all__ = ["undisturbed"]


def waiting(event: asyncio.Event, log: list[str], what: str) -> Any:
    async def hook(request: Any) -> None:
        log.append(what)
        await event.wait()

    return hook


def logging(log: list[str], what: str) -> Any:
    async def hook(request: Any) -> None:
        log.append(f"{what} {request.operation.id.step}")

    return hook


async def test_the_next_step_goes_on_while_a_checkpoint_is_written_and_the_one_after_waits(
    fakes: FakeSextet, controller: Controller, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    written, log = asyncio.Event(), []
    fakes["actor-0"].hooks |= {"checkpoint": waiting(written, log, "write"), "update": logging(log, "update")}
    record = await controller.create("r", checkpoint__save_interval=1)
    await controller.until(lambda: record.step == 2)
    # The checkpoint of step 2 is due and waits: there is one at a time. The run does not go on without it.
    await asyncio.sleep(0.2)
    assert (record.step, log) == (2, ["update 1", "write", "update 2"])
    assert not (Path(record.directory) / "checkpoints" / "step_1" / "run.json").exists()
    written.set()
    await controller.over("r")
    assert (exported(record.directory), saved(record.directory, 3)) == undisturbed
    assert log.count("write") == 3


async def test_a_step_changes_nothing_before_the_state_is_copied(
    fakes: FakeSextet, controller: Controller, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    copied, log = asyncio.Event(), []
    # The actor's copy holds up the critic, too: the checkpoint is of both.
    fakes["actor-0"].hooks["stage"] = waiting(copied, log, "copy")
    fakes["critic-0"].hooks |= {"update": logging(log, "update"), "values": logging(log, "values")}
    record = await controller.create("r", checkpoint__save_interval=1, total_steps=2)
    await controller.until(lambda: "values 2" in log)
    await asyncio.sleep(0.2)
    assert log == ["values 1", "update 1", "copy", "values 2"]
    copied.set()
    await controller.over("r")
    assert record.state == "done"
    assert fakes["critic-0"].done["update"] == 2


@pytest.mark.parametrize("role", ["actor", "critic"])
async def test_a_role_that_dies_while_it_writes_goes_back_to_the_checkpoint_before(
    fakes: FakeSextet, controller: Controller, undisturbed: Any, role: str
) -> None:
    await fakes.start(*ALL)
    learner, tasks = fakes[f"{role}-0"], []

    async def die(request: Any) -> None:
        if fakes["actor-0"].now_version < 2:
            return
        learner.hooks.clear()
        asyncio.get_running_loop().call_later(0.2, lambda: tasks.append(asyncio.create_task(learner.start())))
        await learner.kill()
        await asyncio.sleep(60)

    learner.hooks["checkpoint"] = die
    assert await outcome(controller, fakes, checkpoint__save_interval=1) == undisturbed
    recoveries = [message for kind, _, message in await controller.events("r") if kind == "recovery"]
    assert len(recoveries) == 1
    assert "goes on from step 1" in recoveries[0]


async def test_a_checkpoint_that_was_given_up_is_made_up_for(
    fakes: FakeSextet, controller: Controller, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    words = "checkpoint could not be written: No space left on device"
    fakes["critic-0"].hooks["checkpoint"] = failing(lambda: FailedPrecondition(words), 1)
    record = await controller.create("r", total_steps=5, checkpoint__save_interval=2, recovery__max_retries=0)
    await controller.until(lambda: record.state == "paused")
    assert "checkpoint of step 2" in record.reason
    # The step in progress was played to its end.
    paused = record.step
    assert paused in (3, 4)
    await controller.runs.resume("r")
    await controller.over("r")
    assert record.state == "done"
    checkpoints = [step for kind, step, _ in await controller.events("r") if kind == "checkpoint"]
    assert checkpoints == ([3, 4, 5] if paused == 3 else [4, 5])
    assert fakes["actor-0"].done["update"] == 5


async def test_a_checkpoint_given_up_amid_the_copy_holds_up_nothing_that_comes_after(tmp_path: Path) -> None:
    """Found by test_samples_drawn_once: after a rollback the first update waited for that copy, and the run failed."""
    copying = asyncio.Event()

    async def for_ever(*_: Any) -> None:
        copying.set()
        await asyncio.sleep(60)

    nobody: Any = None
    saver = Saver(tmp_path, 2, for_ever, for_ever)
    await saver.begin(nobody, nobody, Position(1), [])
    await copying.wait()
    await saver.abandon()
    await asyncio.wait_for(saver.copied(), 5)


def test_what_was_refused_does_not_push_out_what_was_written_instead(tmp_path: Path) -> None:
    for step in (2, 3, 4):
        manifest = {"step": step, "position": 0, "versions": {}}
        Local(tmp_path / f"step_{step}" / "run.json").write(json.dumps(manifest).encode())
    checkpoints._remove_old(Local(tmp_path), 1, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_4"]


async def test_what_was_begun_and_given_up_is_swept_away(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    for step in (1, 9):
        (controller.root / "r" / "checkpoints" / f"step_{step}" / "actor").mkdir(parents=True)
    record = await controller.create("r", total_steps=5)
    await controller.over("r")
    assert record.state == "done"
    # Another controller may be about to write what is newer.
    assert sorted(path.name for path in (controller.root / "r" / "checkpoints").iterdir()) == [
        "step_4", "step_5", "step_9"
    ]  # fmt: skip
