"""Pause, resume, cancel, checkpoint, queue; the controller ends and begins again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.controller import runs as runs_module
from services.controller.journal import Journal
from services.controller.runs import Record
from shared.rpc.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
)
from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller
from tests.unit.services.controller.test_failures import exported, outcome, undisturbed

__all__ = ["undisturbed"]


def holding(fakes: FakeSextet, name: str, operation: str, step: int) -> tuple[asyncio.Event, asyncio.Event]:
    """The operation of that step waits: (reached, go on)."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold(request: Any) -> None:
        if request.operation.id.step == step:
            reached.set()
            await go_on.wait()

    fakes[name].hooks[operation] = hold
    return reached, go_on


async def test_pause_ends_the_step_saves_and_lets_the_next_run_play(
    fakes: FakeSextet, controller: Controller, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 1)
    record = await controller.create("r")
    await reached.wait()
    await controller.runs.pause("r")
    go_on.set()
    await controller.until(lambda: record.state == "paused")
    assert record.step == 1
    assert (Path(record.directory) / "checkpoints" / "step_1" / "run.json").exists()
    await outcome(controller, fakes, "other", seed=7)
    await controller.runs.resume("r")
    await controller.over("r")
    assert exported(record.directory) == undisturbed[0]


async def test_a_resumed_run_goes_on_where_the_roles_are(
    fakes: FakeSextet, controller: Controller, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 2)
    record = await controller.create("r")
    await reached.wait()
    await controller.runs.pause("r")
    go_on.set()
    await controller.until(lambda: record.state == "paused")
    await controller.runs.resume("r")
    await controller.over("r")
    assert exported(record.directory) == undisturbed[0]
    assert fakes["actor-0"].done["configure"] == fakes["rollout-0"].done["configure"] == 1


async def test_a_pause_amid_a_step_that_failed_waits_until_the_step_is_played(
    fakes: FakeSextet, controller: Controller, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    failed = False

    async def fail(request: Any) -> None:
        nonlocal failed
        if request.operation.id.step == 2 and not failed:
            failed = True
            await controller.until(lambda: fakes["critic-0"].done["update"] == 2)
            await controller.runs.pause("r")
            raise Internal("a fault of the test")

    fakes["actor-0"].hooks["update"] = fail
    record = await controller.create("r", checkpoint__save_interval=100)
    await controller.until(lambda: record.state in ("paused", "failed", "done"))
    # The critic was past step 1 when the pause came: saved as step 1 it would learn from step 2 twice.
    assert (record.state, record.step) == ("paused", 2)
    assert [path.name for path in (Path(record.directory) / "checkpoints").iterdir()] == ["step_2"]
    await controller.runs.resume("r")
    await controller.over("r")
    assert exported(record.directory) == undisturbed[0]


async def test_cancel_ends_now_and_frees_the_roles(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    reached, _ = holding(fakes, "rollout-0", "generate", 2)
    record = await controller.create("r")
    await reached.wait()
    fakes["rollout-0"].hooks.clear()
    await controller.runs.cancel("r")
    assert record.state == "cancelled"
    await controller.until(lambda: fakes["actor-0"].now_version == -1)
    with pytest.raises(FailedPrecondition, match="cancelled"):
        await controller.runs.resume("r")
    await controller.create("next", total_steps=1)
    assert (await controller.over("next")).state == "done"


async def test_a_checkpoint_can_be_asked_for(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 1)
    record = await controller.create("r", checkpoint__auto_save=False)
    await reached.wait()
    asked = asyncio.create_task(controller.runs.checkpoint("r"))
    await asyncio.sleep(0)
    go_on.set()
    assert await asked == (f"{record.directory}/checkpoints/step_1", 1)


async def test_a_checkpoint_nobody_can_make_any_more_is_answered(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    reached, _ = holding(fakes, "actor-0", "update", 1)
    await controller.create("r")
    await reached.wait()
    asked = asyncio.create_task(controller.runs.checkpoint("r"))
    await asyncio.sleep(0)
    await controller.runs.cancel("r")
    with pytest.raises(FailedPrecondition, match="ended"):
        await asyncio.wait_for(asked, 5)


async def test_a_checkpoint_that_takes_too_long_is_answered_in_words(
    fakes: FakeSextet, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "CHECKPOINT_SECONDS", 0.1)
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 1)
    await controller.create("r", total_steps=1)
    await reached.wait()
    with pytest.raises(DeadlineExceeded, match=r"run 'r' was not saved within 0\.1 s"):
        await controller.runs.checkpoint("r")
    go_on.set()
    assert (await controller.over("r")).state == "done"


async def test_a_checkpoint_asked_of_a_run_that_has_just_ended_is_answered(
    fakes: FakeSextet, controller: Controller
) -> None:
    await fakes.start(*ALL)
    await controller.create("r", total_steps=1)
    await controller.until(lambda: controller.runs.active == "r")
    assert controller.runs._active
    conductor = controller.runs._active.conductor
    await controller.over("r")
    async with asyncio.timeout(20):
        with pytest.raises(FailedPrecondition, match="the run has ended"):
            await conductor.checkpoint()


async def test_runs_are_played_one_at_a_time_in_order(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 1)
    first = await controller.create("a", total_steps=1)
    await reached.wait()
    second, third = await controller.create("b", total_steps=1), await controller.create("c", total_steps=1)
    assert [record.state for record in (first, second, third)] == ["running", "queued", "queued"]
    await controller.runs.cancel("b")
    go_on.set()
    await controller.over("c")
    assert [record.state for record in (first, second, third)] == ["done", "cancelled", "done"]
    assert [record.id for record in await controller.runs.list()] == ["c", "b", "a"]


async def test_resume_from_another_runs_checkpoint(fakes: FakeSextet, controller: Controller, undisturbed: Any) -> None:
    await fakes.start(*ALL)
    await outcome(controller, fakes, "first", total_steps=2)
    first = await controller.runs.get("first")
    assert (await outcome(controller, fakes, "second", resume_from=f"{first.directory}/checkpoints/step_2"))[
        0
    ] == undisturbed[0]
    assert (await controller.runs.get("second")).step == 3


async def test_a_failed_run_is_resumed_from_its_last_checkpoint(
    fakes: FakeSextet, controller: Controller, undisturbed: Any
) -> None:
    await fakes.start(*ALL)

    async def fail(request: Any) -> None:
        if request.operation.id.step == 3:
            raise InvalidArgument("broken")

    fakes["reward-0"].hooks["score"] = fail
    record = await controller.create("r")
    await controller.over("r")
    assert (record.state, record.reason) == ("failed", "reward.score: broken")
    fakes["reward-0"].hooks.clear()
    await controller.runs.resume("r")
    await controller.until(lambda: record.state == "done")
    assert exported(record.directory) == undisturbed[0]


async def test_create_is_idempotent_and_refuses_what_is_wrong(fakes: FakeSextet, controller: Controller) -> None:
    record = await controller.create("r")
    assert await controller.create("r") is record
    with pytest.raises(AlreadyExists, match="another configuration"):
        await controller.create("r", seed=3)
    with pytest.raises(InvalidArgument, match=r"actor\.optimizr.*actor\.optimizer"):
        await controller.create(actor={"optimizr": 1})
    with pytest.raises(InvalidArgument, match="did you mean 'ppo'"):
        await controller.create(flow="pppo")
    with pytest.raises(InvalidArgument, match="flow: grpo"):
        await controller.create(algorithm={"advantage": "grpo"})
    with pytest.raises(InvalidArgument, match="letters"):
        await controller.create("../r")
    with pytest.raises(NotFound, match="no run 'x'"):
        await controller.runs.get("x")


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("rollout-0", "generate"),
        ("critic-0", "values"),
        ("actor-0", "advantages"),
        ("actor-0", "update"),
        ("critic-0", "update"),
        ("actor-0", "after update"),
        ("actor-0", "publish_weights"),
        ("rollout-0", "commit_weights"),
    ],
)
async def test_the_controller_dies_in_a_step_and_another_goes_on(
    fakes: FakeSextet, store: Any, tmp_path: Path, undisturbed: Any, name: str, operation: str
) -> None:
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, name, operation, 2)
    async with Controller(store, tmp_path / "runs") as first:
        await first.create("r", checkpoint__save_interval=100)
        await reached.wait()
    go_on.set()
    async with Controller(store, tmp_path / "runs") as second:
        record = await second.over("r")
        assert (record.state, record.reason) == ("done", "")
        assert exported(record.directory) == undisturbed[0]
        recoveries = [message for kind, _, message in await second.events("r") if kind == "recovery"]
    assert any("goes on from step" in message for message in recoveries)
    # Nothing was done twice, although no checkpoint was there to go back to.
    assert fakes["actor-0"].done["update"] == fakes["critic-0"].done["update"] == 3
    assert fakes["actor-0"].done["configure"] == 1


async def test_the_controller_goes_on_when_the_store_was_emptied(
    fakes: FakeSextet, store: Any, tmp_path: Path, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 3)
    async with Controller(store, tmp_path / "runs") as first:
        await first.create("r")
        await reached.wait()
        for key in list(store._values):
            if not key.startswith("sextet:leases"):
                await store.delete(key)
        await asyncio.sleep(0.3)
        go_on.set()
        record = await first.over("r")
        assert record.state == "done"
        assert exported(record.directory) == undisturbed[0]


async def test_a_controller_that_starts_with_an_emptied_store_finds_its_runs(
    fakes: FakeSextet, store: Any, tmp_path: Path, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 3)
    async with Controller(store, tmp_path / "runs") as first:
        await first.create("r")
        await reached.wait()
    for key in list(store._values):
        await store.delete(key)
    go_on.set()
    async with Controller(store, tmp_path / "runs") as second:
        record: Record = await second.over("r")
        assert (record.state, record.step) == ("done", 3)
        assert exported(record.directory) == undisturbed[0]
    assert fakes["actor-0"].done["update"] == 3


async def test_a_torn_journal_line_is_cut_off(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    await journal.begin(3, journal.position, {"rollout": {"dataset_rows": "7"}})
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"commit","epo')
    again = Journal.open(tmp_path)
    assert (again.begun, again.epoch, again.facts) == (True, 3, {"rollout": {"dataset_rows": "7"}})
    await again.rollback(4, "because")
    assert Journal.open(tmp_path).take == 1
