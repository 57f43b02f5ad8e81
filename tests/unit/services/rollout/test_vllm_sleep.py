"""An engine that shares its GPU: awake in its turns, asleep before they end, and rows of others wait for the next."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
import pytest_asyncio

from services.rollout.backend import EngineError, SamplingParams
from services.rollout.backends.vllm import VllmBackend
from services.rollout.backends.vllm_sleep import WEIGHTS, Sleep
from tests.fakes.rollout import collect, requests, rollout_config
from tests.fakes.tiny import write_tiny_llama
from tests.fakes.vllm import FakeVllm, fake_vllm

ROWS = requests(2, SamplingParams(max_tokens=3))
AWAKE = ["weights", "kv_cache"]


async def answer(question: Awaitable[Any]) -> Any:
    return await question


async def rounds(count: int = 200) -> None:
    """Whoever can go on does."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return fake_vllm(monkeypatch)


@pytest_asyncio.fixture
async def backend(engine: FakeVllm, tmp_path: Any) -> AsyncIterator[VllmBackend]:
    backend = VllmBackend()
    config = rollout_config(write_tiny_llama(tmp_path / "m"), "rollout.engine=vllm", "rollout.sleep=true")
    await backend.configure(config, None, 40)
    assert engine.done == ["sleep 1"]
    engine.done.clear()
    yield backend
    await backend.release()


async def commit(backend: VllmBackend, version: int) -> None:
    await backend.prepare_weights(version, None)
    await backend.commit_weights(version)


async def test_the_stages_of_a_step(backend: VllmBackend, engine: FakeVllm) -> None:
    for version in (1, 2):
        async with backend.turn():
            await collect(backend.generate(ROWS))
        assert engine.done.pop() == "sleep 1", "before the call for rows is answered"
        await commit(backend, version)
    assert engine.done == [*AWAKE, "row", "row", "weights", "load", "kv_cache", "row", "row", "weights", "load"]


async def test_between_rows_of_a_turn_it_stays_awake(backend: VllmBackend, engine: FakeVllm) -> None:
    async with backend.turn():
        assert engine.done == [], "nobody has said anything yet"
        for _ in range(3):
            await collect(backend.generate(ROWS[:1]))
            assert await backend.health() == ""
    assert engine.done == [*AWAKE, "row", "row", "row", "sleep 1"]


async def test_rows_of_others_wait_while_the_actor_has_the_memory(backend: VllmBackend, engine: FakeVllm) -> None:
    """Before the first turn, and between the end of one and the commit of a version or the next turn."""
    waiting = asyncio.create_task(collect(backend.generate(ROWS)))
    await rounds()
    assert engine.done == []
    async with backend.turn():
        await waiting
    assert engine.done == [*AWAKE, "row", "row", "sleep 1"]
    waiting = asyncio.create_task(collect(backend.generate(ROWS)))
    await rounds()
    assert await backend.health() == ""
    assert engine.asleep
    await commit(backend, 1)
    samples = await waiting
    assert {sample.versions for sample in samples.values()} == {(1, 1, 1)}
    # The actor rests until the next call for rows: others are served meanwhile, without a sleep in between.
    await collect(backend.generate(ROWS))
    async with backend.turn():
        pass
    assert engine.done[5:] == ["weights", "load", "kv_cache", *["row"] * 4, "sleep 1"]


async def test_a_turn_ends_when_rows_of_others_have(backend: VllmBackend, engine: FakeVllm) -> None:
    engine.gate.clear()

    async def turn() -> None:
        async with backend.turn():
            await rounds()

    ending = asyncio.create_task(turn())
    piece = asyncio.create_task(collect(backend.generate(ROWS[:1])))
    await rounds(1000)
    assert not ending.done()
    late = asyncio.create_task(collect(backend.generate(ROWS[:1])))
    engine.gate.set()
    await asyncio.gather(ending, piece)
    await rounds()
    assert engine.done == [*AWAKE, "row", "sleep 1"]
    assert not late.done()
    async with backend.turn():
        await late


async def test_a_turn_ends_when_a_probe_has(backend: VllmBackend, engine: FakeVllm) -> None:
    async with backend.turn():
        await collect(backend.generate(ROWS[:1]))
        engine.gate.clear()
        probe = asyncio.create_task(backend.health())
        await rounds()
        asyncio.get_running_loop().call_later(0.1, engine.gate.set)
    assert await probe == ""
    assert engine.done[-1] == "sleep 1"


async def test_a_turn_whose_rows_were_all_there_leaves_nothing_awake(backend: VllmBackend, engine: FakeVllm) -> None:
    await commit(backend, 1)
    assert engine.asleep == {"kv_cache"}
    async with backend.turn():
        pass
    assert engine.done == ["weights", "load", "kv_cache", "sleep 1"]


async def test_who_waits_for_an_engine_that_is_let_go_is_told(backend: VllmBackend, engine: FakeVllm) -> None:
    waiting = asyncio.create_task(collect(backend.generate(ROWS)))
    await rounds()
    await backend.release()
    with pytest.raises(EngineError, match="not configured"):
        await waiting
    assert engine.done == []


async def test_turns_that_overlap_sleep_once_after_the_last() -> None:
    engine = FakeVllm()
    sleep = Sleep(engine, answer)

    async def sample(pauses: int) -> None:
        async with sleep.turn(), sleep.sampling():
            for _ in range(pauses):
                await asyncio.sleep(0)
                assert not engine.asleep

    await asyncio.gather(*(sample(pauses) for pauses in (1, 5, 3, 9)))
    assert engine.done == ["sleep 1"]
    # One begins while another one's end puts the engine to sleep.
    for gap in range(8):
        first = asyncio.create_task(sample(1))
        await rounds(gap)
        await asyncio.gather(first, sample(2))
        assert sleep.asleep


async def test_a_turn_that_begins_while_another_ends_holds_nobody_up() -> None:
    engine = FakeVllm()
    sleep, used = Sleep(engine, answer), asyncio.Event()

    async def other() -> None:
        async with sleep.sampling():
            await used.wait()

    async def turn() -> None:
        async with sleep.turn():
            await rounds(2)

    ending, others = asyncio.create_task(turn()), asyncio.create_task(other())
    await rounds()
    assert not ending.done()
    async with sleep.turn():
        await asyncio.wait_for(ending, 60)
        assert engine.done == []
        used.set()
    await others
    assert engine.done == ["sleep 1"]


async def test_an_engine_that_shares_nothing_stays_awake() -> None:
    sleep = Sleep(None, answer)
    async with sleep.turn(), sleep.sampling():
        pass
    async with sleep.sampling():
        pass
    await sleep.wake(WEIGHTS)
    assert not sleep.asleep


def test_only_vllm_sleeps(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"rollout\.sleep needs rollout\.engine=vllm; it is hf"):
        rollout_config(tmp_path, "rollout.sleep=true")
