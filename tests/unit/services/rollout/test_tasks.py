"""Tasks of agents: in order, each to one agent, and never waited for without end."""

import asyncio
from types import SimpleNamespace

import pytest

from services.rollout import tasks as module
from services.rollout.backend import EngineError
from services.rollout.tasks import Task, Tasks
from shared.batch.columns import RowKey
from shared.data.datasets import PromptExample

EXAMPLE = PromptExample("1+1=", "d", "2", "{}")


def made(count: int) -> list[Task]:
    return [Task(RowKey("1:0:0", k), EXAMPLE, k, False, False) for k in range(count)]


async def played(tasks: Tasks, wanted: list[Task], patience: float = 60.0) -> list[Task]:
    return [task async for task in tasks.play(wanted, patience)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)


async def test_each_goes_to_one_agent_in_order_and_ends_once() -> None:
    tasks, wanted = Tasks(), made(3)
    playing = asyncio.create_task(played(tasks, wanted))
    # Who came before there were any is served first.
    taken = await asyncio.gather(*(tasks.claim(20) for _ in range(3)))
    assert taken == wanted
    assert await tasks.claim(0) is None
    for task in (wanted[2], wanted[0], wanted[2], wanted[1]):
        task.finish()
    assert await asyncio.wait_for(playing, 20) == [wanted[2], wanted[0], wanted[1]]


async def test_what_is_given_back_waits_again_and_what_is_withdrawn_does_not() -> None:
    tasks, wanted = Tasks(), made(2)
    playing = asyncio.create_task(played(tasks, wanted))
    first = await tasks.claim(20)
    assert first is wanted[0]
    tasks.give_back(first)
    assert [await tasks.claim(0), await tasks.claim(0)] == [wanted[1], wanted[0]]
    tasks.give_back(first)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert await tasks.claim(0) is None
    # An agent that ends it now is too late.
    first.finish()


async def test_without_agents_the_call_ends() -> None:
    with pytest.raises(EngineError, match=r"no agent has asked for a task for .* POST /v1/sessions/claim"):
        await asyncio.wait_for(played(Tasks(), made(2), 0.1), 20)


@pytest.mark.parametrize("turns", [[], ["one"]])
async def test_agents_that_do_not_come_back_are_three_at_most(turns: list[str]) -> None:
    """What has been said by then is a sample, without a grade; where nothing was said there is none."""
    tasks, wanted = Tasks(), made(1)
    playing = asyncio.create_task(played(tasks, wanted, 1.0))
    for _ in range(3):
        task = await asyncio.wait_for(tasks.claim(20), 20)
        assert task is wanted[0]
        task.session = SimpleNamespace(idle=2.0, turns=turns)  # type: ignore[assignment]
    if turns:
        assert await asyncio.wait_for(playing, 20) == wanted
        return
    with pytest.raises(EngineError, match="3 agents took it and did not come back"):
        await asyncio.wait_for(playing, 20)
