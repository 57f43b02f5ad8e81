"""An engine that shares its GPU: asleep before the last call ends, weights back for a version, the cache for rows."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from services.rollout.backends.vllm_sleep import CACHE, WEIGHTS, Sleep
from tests.fakes.rollout import rollout_config


class FakeEngine:
    """Keeps vLLM's rules: only what is all awake goes to sleep, and only what sleeps wakes up."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.done: list[str] = []

    async def sleep(self, level: int) -> None:
        await asyncio.sleep(0)
        assert not self.asleep
        self.asleep = {WEIGHTS, CACHE}
        self.done.append(f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> None:
        await asyncio.sleep(0)
        assert self.asleep.issuperset(tags)
        self.asleep -= set(tags)
        self.done += tags


async def answer(question: Awaitable[Any]) -> Any:
    return await question


async def test_the_stages_of_a_step() -> None:
    engine = FakeEngine()
    sleep = Sleep(engine, answer)
    await sleep.rest()
    for _ in range(2):
        async with sleep.sampling():
            assert not sleep.asleep
            engine.done.append("rows")
        assert sleep.asleep
        engine.done.append("training")
        await sleep.wake(WEIGHTS)
        engine.done.append("sync")
        assert sleep.asleep, "without keys and values it makes no token"
    assert engine.done == [
        "sleep 1", "weights", "kv_cache", "rows", "sleep 1", "training", "weights", "sync",
        "kv_cache", "rows", "sleep 1", "training", "weights", "sync",
    ]  # fmt: skip


async def test_calls_that_overlap_sleep_once_after_the_last() -> None:
    engine = FakeEngine()
    sleep = Sleep(engine, answer)

    async def sample(pauses: int) -> None:
        async with sleep.sampling():
            for _ in range(pauses):
                await asyncio.sleep(0)
                assert not engine.asleep

    await asyncio.gather(*(sample(pauses) for pauses in (1, 5, 3, 9)))
    assert engine.done == ["sleep 1"]
    # One begins while another one's end puts the engine to sleep.
    for gap in range(6):
        first = asyncio.create_task(sample(1))
        for _ in range(gap):
            await asyncio.sleep(0)
        await asyncio.gather(first, sample(2))
        assert sleep.asleep


async def test_an_engine_that_shares_nothing_stays_awake() -> None:
    sleep = Sleep(None, answer)
    async with sleep.sampling():
        pass
    await sleep.wake(WEIGHTS)
    assert not sleep.asleep


def test_only_vllm_sleeps(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"rollout\.sleep needs rollout\.engine=vllm; it is hf"):
        rollout_config(tmp_path, "rollout.sleep=true")
