"""Sessions that nobody comes back to, and a wait for a task that outlives its run."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout.openai import sessions as module
from services.rollout.openai.app import MAX_WAIT, Claim, Face
from services.rollout.openai.sessions import Sessions
from services.rollout.tasks import Task, Tasks
from shared.batch.columns import RowKey
from shared.batch.store import BatchStore
from shared.data.datasets import PromptExample
from shared.rpc.errors import ResourceExhausted, Unavailable


def made(number: int = 0) -> Task:
    return Task(RowKey("1:0:0", number), PromptExample("1+1=", "d", "2", "{}"), 7, False, False)


def test_sessions_that_are_over_make_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: those of lost agents and of steps begun anew took all places, and no task could be claimed."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 3)
    sessions, tasks = Sessions("r0"), [made(0), made(1)]
    for task in tasks:
        task.session = sessions.start("r", task=task)
    old = sessions.start("run before")
    kept, tasks[0].session = tasks[1].session, None
    assert kept
    open_ = [sessions.start("r"), sessions.start("r")]
    for session in (kept, *open_):
        assert sessions.get(session.id, "r") is session
    assert sessions.drop(old.id) is None
    with pytest.raises(ResourceExhausted):
        sessions.start("r")


async def _stays() -> bool:
    return False


REQUEST: Any = SimpleNamespace(is_disconnected=_stays)


class Role:
    """Of a rollout: its tasks, and its run, None while none is loaded."""

    def __init__(self) -> None:
        self.tasks, self.run = Tasks(), "before"

    def serving(self) -> Any:
        if not self.run:
            raise Unavailable("no run is loaded")
        return SimpleNamespace(run=self.run)


async def test_an_agent_that_waits_gets_a_session_of_the_run_whose_task_it_is() -> None:
    """Regression: it was of the run that was loaded when the wait began, and nothing could be said in it."""
    role: Any = Role()
    face = Face(role, BatchStore(1), "r0")
    waiting = asyncio.create_task(face.claim(Claim(seconds=MAX_WAIT), REQUEST))
    await asyncio.sleep(0.01)
    role.run = "after"
    playing = role.tasks.play([made()], 60)
    ended = asyncio.create_task(anext(playing))
    answer = json.loads(bytes((await waiting).body))
    assert answer["run"] == "after"
    assert face._session(answer["id"]).id == answer["id"]
    ended.cancel()
    await asyncio.gather(ended, return_exceptions=True)


async def test_a_task_that_was_claimed_while_no_run_is_loaded_waits_for_another_agent() -> None:
    role: Any = Role()
    face, task = Face(role, BatchStore(1), "r0"), made()
    playing = role.tasks.play([task], 60)
    waiting = asyncio.create_task(face.claim(Claim(seconds=MAX_WAIT), REQUEST))
    await asyncio.sleep(0.01)
    role.run = ""
    ended = asyncio.create_task(anext(playing))
    with pytest.raises(Unavailable):
        await waiting
    assert await role.tasks.claim(0) is task
    task.finish()
    await ended
    await playing.aclose()
