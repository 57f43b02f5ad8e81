"""A journal stays within its bytes, whoever writes to it and whenever it ends."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from services.controller import journal as module
from services.controller.journal import CannotWrite, Journal, Position, parts

FACTS = {"rollout": {"dataset_rows": "7"}}


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 2000)


def at(step: int) -> Position:
    return Position(step, step * 4, {"actor": step}, "weights")


async def played(directory: Path, first: int, last: int, epoch: int = 3) -> Journal:
    journal = Journal.open(directory)
    if not journal.begun:
        await journal.rollback(epoch, "none")
        await journal.begin(epoch, at(0), FACTS)
    for step in range(first, last + 1):
        await journal.issue(epoch, "actor.update")
        await journal.commit(epoch, at(step))
    return journal


def same(one: Journal, other: Journal) -> bool:
    names = ("begun", "position", "epoch", "take", "facts", "issued")
    return all(getattr(one, name) == getattr(other, name) for name in names)


async def test_two_parts_are_kept_and_say_all(tmp_path: Path) -> None:
    live = await played(tmp_path, 1, 100)
    assert len(parts(tmp_path)) == 2
    assert sum(len(text) for text in texts(tmp_path)) < 2 * 2600
    assert same(Journal.open(tmp_path), live)
    again = await played(tmp_path, 101, 130)
    assert (again.position, again.take, again.facts) == (at(130), 1, FACTS)
    assert same(Journal.open(tmp_path), again)


async def test_a_part_begun_by_a_deposed_controller_undoes_nothing(tmp_path: Path) -> None:
    await played(tmp_path, 1, 3)
    deposed = Journal.open(tmp_path)
    # It is frozen; another one goes on in a later epoch, until the part is nearly full.
    live = await played(tmp_path, 4, 4, epoch=5)
    while live.path.stat().st_size < 1800:
        await live.issue(5, "actor.update")
        await live.commit(5, at(live.position.step + 1))
    while len(parts(tmp_path)) == 1:
        await deposed.commit(3, at(99))
    await live.issue(5, "actor.update")
    await live.commit(5, at(live.position.step + 1))
    assert same(Journal.open(tmp_path), live)


async def test_a_part_that_was_begun_and_not_written_loses_nothing(tmp_path: Path) -> None:
    live = await played(tmp_path, 1, 3)
    (tmp_path / "journal.1.jsonl").touch()
    assert same(Journal.open(tmp_path), live)
    assert Journal.open(tmp_path).path.name == "journal.1.jsonl"


async def test_a_disk_without_room_for_the_next_part_makes_the_run_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed of an OSError: nobody knew that it only had to wait."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", full)
        with pytest.raises(CannotWrite, match="No space left"):
            await played(tmp_path, 1, 100)
    last = Journal.open(tmp_path).position.step
    assert 1 < last < 100
    assert (await played(tmp_path, last + 1, 100)).position == at(100)


def texts(directory: Path) -> list[str]:
    return [path.read_text() for path in parts(directory)]
