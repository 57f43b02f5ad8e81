"""A disk that is full or can't be written: nothing that the roles hold is thrown away for it."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.controller import journal as journal_module
from services.controller.journal import CannotWrite, append_line
from services.controller.summary import Summary
from shared.places import Local
from shared.rpc.errors import FailedPrecondition, InvalidArgument, Unavailable
from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller, failing
from tests.unit.services.controller.test_failures import exported, outcome, saved, undisturbed

__all__ = ["undisturbed"]


def full_disk(directory: str, times: int) -> Callable[[Any], Awaitable[None]]:
    """A role's words when it can't write its checkpoint, `times` times."""
    words = f"checkpoint {directory!r} could not be written: No space left on device"
    fail = failing(lambda: FailedPrecondition(words), times)

    async def fail_late(request: Any) -> None:
        # The other role has written its half by then.
        await asyncio.sleep(0.05)
        await fail(request)

    return fail_late


async def test_a_full_disk_at_the_last_checkpoint_pauses_the_run_and_it_goes_on_from_live_state(
    fakes: FakeSextet, controller: Controller, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    fakes["actor-0"].hooks["checkpoint"] = full_disk("there", 3)
    record = await controller.create("r", recovery__max_retries=2, checkpoint__save_interval=100)
    await controller.until(lambda: record.state in ("paused", "failed", "done"))
    directory = Path(record.directory) / "checkpoints" / "step_3"
    assert (record.state, record.step) == ("paused", 3)
    assert str(directory) in record.reason
    assert "No space left on device" in record.reason
    assert not directory.exists()
    assert fakes["critic-0"].done["update"] == 3
    await controller.runs.resume("r")
    await controller.over("r")
    assert (record.state, record.reason) == ("done", "")
    # Both halves are there, although one of them had been written, and removed, before.
    assert (exported(record.directory), saved(record.directory, 3)) == undisturbed
    assert (directory / "actor" / "state.json").exists()
    assert fakes["actor-0"].done["update"] == fakes["critic-0"].done["update"] == 3
    assert fakes["actor-0"].done["configure"] == 1
    messages = [message for _, _, message in await controller.events("r")]
    assert not any("step 4" in message for message in messages)
    assert sum("checkpoint of step 3 failed" in message for message in messages) == 2


@pytest.mark.parametrize("error", [FailedPrecondition, Unavailable])
async def test_a_checkpoint_that_fails_once_is_saved_again_and_nothing_else_is_done_again(
    fakes: FakeSextet, controller: Controller, undisturbed: Any, error: type[Exception]
) -> None:
    await fakes.start(*ALL)
    fakes["critic-0"].hooks["checkpoint"] = failing(lambda: error("not now"), 1)
    assert await outcome(controller, fakes) == undisturbed
    assert fakes["actor-0"].done["update"] == 3
    assert not any(kind == "recovery" for kind, _, _ in await controller.events("r"))


async def test_a_full_disk_at_the_export_pauses_the_run(
    fakes: FakeSextet, controller: Controller, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    fakes["actor-0"].hooks["export"] = full_disk("there", 2)
    record = await controller.create("r", recovery__max_retries=1, checkpoint__auto_save=False)
    await controller.until(lambda: record.state in ("paused", "failed", "done"))
    assert record.state == "paused"
    assert f"{record.directory}/model" in record.reason
    await controller.runs.resume("r")
    await controller.over("r")
    assert (record.state, exported(record.directory)) == ("done", undisturbed[0])
    assert fakes["actor-0"].done["update"] == 3


async def test_who_asked_for_a_checkpoint_that_cannot_be_written_is_told_why(
    fakes: FakeSextet, controller: Controller
) -> None:
    await fakes.start(*ALL)
    reached = asyncio.Event()

    async def at_update(request: Any) -> None:
        reached.set()
        await asyncio.sleep(0.1)

    fakes["actor-0"].hooks |= {"update": at_update, "checkpoint": full_disk("there", 100)}
    await controller.create("r", recovery__max_retries=0)
    await reached.wait()
    with pytest.raises(FailedPrecondition, match="No space left on device"):
        await asyncio.wait_for(controller.runs.checkpoint("r"), 10)


async def test_a_disk_that_is_full_for_the_journal_and_the_records_too_loses_nothing(
    fakes: FakeSextet, controller: Controller, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fakes.start(*ALL)
    full = False

    async def fill(request: Any) -> None:
        nonlocal full
        full = request.operation.id.step == 2

    def fsync(descriptor: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal_module.os, "fsync", fsync)
    fakes["actor-0"].hooks["after update"] = fill
    record = await controller.create("r", checkpoint__save_interval=100)
    await controller.until(lambda: record.state in ("paused", "failed", "done"))
    assert (record.state, record.step) == ("paused", 1)
    assert record.reason.startswith(f"directory: {record.directory!r} cannot be written: No space left on device")
    full = False
    await controller.runs.resume("r")
    await controller.over("r")
    assert (record.state, exported(record.directory)) == ("done", undisturbed[0])
    assert fakes["actor-0"].done["update"] == 3
    assert [line["step"] for line in Summary(Path(record.directory)).lines()] == [1, 2, 3]


def test_a_line_that_does_not_fit_leaves_nothing_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    append_line(path, b"whole\n")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(journal_module.os, "fsync", fsync)
    with pytest.raises(CannotWrite, match="cannot be written: Input/output error"):
        append_line(path, b"torn\n")
    assert path.read_bytes() == b"whole\n"


async def test_a_directory_that_cannot_be_written_is_refused_at_once(controller: Controller, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    directory = str(tmp_path / "file" / "run")
    with pytest.raises(InvalidArgument, match=r"directory: .*file/run' cannot be written: Not a directory"):
        await controller.create("r", directory=directory)
    assert not await controller.runs.list()


async def test_a_directory_that_cannot_be_written_any_more_is_named_at_the_start(
    fakes: FakeSextet, controller: Controller, tmp_path: Path
) -> None:
    await fakes.start(*ALL)
    reached = asyncio.Event()

    async def wait(request: Any) -> None:
        reached.set()
        await asyncio.sleep(60)

    fakes["rollout-0"].hooks["generate"] = wait
    await controller.create("first")
    await reached.wait()
    directory = tmp_path / "mine"
    record = await controller.create("r", directory=str(directory))
    directory.rmdir()
    directory.write_text("")
    await controller.runs.cancel("first")
    await controller.over("r")
    assert (record.state, record.reason) == ("failed", f"directory: {str(directory)!r} cannot be written: File exists")


async def test_a_checkpoint_at_the_end_leaves_nothing_to_play(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    first = await controller.create("first", total_steps=5)
    await controller.over("first")
    start = f"{first.directory}/checkpoints/step_5"
    with pytest.raises(InvalidArgument, match="the checkpoint is at step 5 but total_steps is 5: raise total_steps"):
        await controller.create("r", total_steps=5, resume_from=start)
    with pytest.raises(FailedPrecondition, match="no complete checkpoint"):
        await controller.create("r", resume_from=f"{first.directory}/checkpoints/step_9")
    # 10 rows in batches of 4: two steps, which only the rollout's answer tells.
    record = await controller.create("r", total_steps=None, total_epochs=1, resume_from=start)
    await controller.over("r")
    assert record.state == "failed"
    assert "the checkpoint is at step 5 but total_epochs=1 makes 2: raise total_epochs" in record.reason


def test_a_run_without_steps_has_a_summary(tmp_path: Path) -> None:
    Summary(tmp_path).write()
    assert '"steps": 0' in (tmp_path / "summary.json").read_text()


@pytest.mark.parametrize("at", ["a save", "the recovery"])
async def test_checkpoints_that_cannot_be_looked_at_for_a_moment_cost_no_run(
    fakes: FakeSextet, controller: Controller, undisturbed: Any, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """As a store of checkpoints that does not answer: the run ended of OSError, though a read that failed is no end."""
    await fakes.start(*ALL)
    actor, children, left, restarting = fakes["actor-0"], Local.children, [0], []

    def look(place: Local) -> list[str]:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return children(place)

    async def restart() -> None:
        await actor.kill()
        left[0] = 1
        await actor.start()

    async def update(request: Any) -> None:
        if request.operation.id.step == 3 and not restarting:
            await controller.until((controller.root / "r" / "checkpoints" / "step_2" / "run.json").exists)
            restarting.append(asyncio.create_task(restart()))
            await asyncio.sleep(60)

    async def checkpoint(request: Any) -> None:
        # Twice to remove what is old, then to see what is there.
        left[0] = 3

    monkeypatch.setattr(Local, "children", look)
    actor.hooks |= {"update": update} if at == "the recovery" else {"checkpoint": checkpoint}
    assert await outcome(controller, fakes) == undisturbed
    await asyncio.gather(*restarting)
    warnings = [message for kind, _, message in await controller.events("r") if kind == "warning"]
    assert any("can't be read: [Errno 5]" in message for message in warnings)
