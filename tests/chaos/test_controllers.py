"""Several controllers and a Redis that comes and goes: one leads, whoever is stopped can write nothing any more.

The roles live in this process; what they did is counted there.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import from_url

from shared.state import StateStore, embedded
from tests.chaos.histories import violations
from tests.chaos.processes import read_lines
from tests.fakes.sextet import FakeSextet
from tests.integration.test_controller_process import Process, applied_once, controller, fakes, holding, redis, store

__all__ = ["controller", "fakes", "redis", "store"]
pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

LEASE_SECONDS = 2.0


@pytest_asyncio.fixture
async def standby(
    controller: Process, store: StateStore, redis: embedded.EmbeddedRedis, tmp_path: Path
) -> AsyncIterator[Process]:
    """A second controller over the same run directories."""
    process = Process(store, redis.url, tmp_path)
    await controller.stub()
    await process.start("--replica", "controller-1")
    await process.stub()
    yield process
    await process.close()


def journal(directory: Path, id: str) -> list[dict[str, Any]]:
    return read_lines(directory / "runs" / id / "journal.jsonl")


async def until(what: str, true: Any, seconds: float = 60) -> float:
    """Seconds until `true()`."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def test_a_frozen_leader_is_replaced_and_fenced_when_it_wakes(
    fakes: FakeSextet, controller: Process, standby: Process
) -> None:
    reached, go_on = holding(fakes, 3)
    await controller.create("r", total_steps=6)
    await asyncio.wait_for(reached.wait(), 60)
    controller.process.send_signal(signal.SIGSTOP)
    epoch = journal(controller.directory, "r")[-1]["epoch"]
    took = await until("the other takes over", lambda: journal(controller.directory, "r")[-1]["epoch"] > epoch)
    assert took < LEASE_SECONDS + 2
    controller.process.send_signal(signal.SIGCONT)
    await asyncio.sleep(1)
    go_on.set()
    run = await standby.end("r")
    assert (run.state, run.reason, run.step) == ("done", "", 6)
    assert applied_once(fakes, 6)
    lines = journal(controller.directory, "r")
    assert violations(lines, {}) == [f"{name} of step {step}, take 0, was applied 0 times" for step, name in issued()]
    # Of the old term nothing that counts came after the new one began.
    assert controller.process.returncode is None


def issued() -> list[tuple[int, str]]:
    """The fakes keep no history of their own: the validator misses it, and nothing else."""
    return [(step, name) for step in range(1, 7) for name in ("actor.update", "critic.update")]


async def test_leaders_are_frozen_and_woken_at_random(fakes: FakeSextet, controller: Process, standby: Process) -> None:
    seed = int(os.environ.get("SEXTET_CHAOS_SEED", "0"))
    print(f"seed {seed}")
    choose, steps = random.Random(seed), 40

    async def slowly(request: Any) -> None:
        await asyncio.sleep(0.15)

    fakes["actor-0"].hooks["update"] = slowly
    await controller.create("r", total_steps=steps)
    for _ in range(6):
        frozen = choose.choice([controller, standby])
        await asyncio.sleep(choose.uniform(0.1, 1))
        frozen.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(choose.uniform(0.5, LEASE_SECONDS + 1.5))
        frozen.process.send_signal(signal.SIGCONT)
    await until("the run ends", lambda: steps == last_step(controller.directory), 120)
    assert applied_once(fakes, steps)
    wrong = [text for text in violations(journal(controller.directory, "r"), {}) if "was applied 0 times" not in text]
    assert wrong == []


def last_step(directory: Path) -> int:
    return max((line["step"] for line in journal(directory, "r") if line["kind"] == "commit"), default=0)


async def test_redis_is_killed_fifty_times_in_a_run(
    fakes: FakeSextet, controller: Process, redis: embedded.EmbeddedRedis, tmp_path: Path
) -> None:
    ended = asyncio.Event()

    async def slowly(request: Any) -> None:
        # The run lasts as long as the kills do.
        await asyncio.sleep(0.0 if ended.is_set() else 0.5)

    fakes["actor-0"].hooks["update"] = slowly
    await controller.create("r", total_steps=200)
    server = redis
    for _ in range(50):
        server.process.kill()
        await asyncio.to_thread(server.process.wait)
        await asyncio.sleep(0.1)
        server = await asyncio.to_thread(embedded.start_redis, tmp_path / "redis", redis.port)
        await asyncio.sleep(0.3)
    try:
        killed_until = last_step(tmp_path)
        ended.set()
        await until("the run ends", lambda: last_step(tmp_path) == 200, 120)
        assert killed_until >= 10, "the run went on while Redis was killed"
        run = await controller.end("r")
        assert (run.state, run.reason, run.step) == ("done", "", 200)
        assert applied_once(fakes, 200)
        assert [line["step"] for line in journal(tmp_path, "r") if line["kind"] == "commit"] == list(range(1, 201))
    finally:
        await asyncio.to_thread(server.stop)


async def test_redis_is_emptied_ten_times_in_a_run(
    fakes: FakeSextet, controller: Process, redis: embedded.EmbeddedRedis, tmp_path: Path
) -> None:
    async def slowly(request: Any) -> None:
        await asyncio.sleep(0.1)

    fakes["actor-0"].hooks["update"] = slowly
    await controller.create("r", total_steps=30)
    async with from_url(redis.url) as client:
        for _ in range(10):
            await asyncio.sleep(0.3)
            await client.flushall()
    run = await controller.end("r")
    assert (run.state, run.reason, run.step) == ("done", "", 30)
    assert applied_once(fakes, 30)
    assert [line["step"] for line in journal(tmp_path, "r") if line["kind"] == "commit"] == list(range(1, 31))


async def test_redis_is_gone_for_thirty_seconds(
    fakes: FakeSextet, controller: Process, redis: embedded.EmbeddedRedis, tmp_path: Path
) -> None:
    async def slowly(request: Any) -> None:
        await asyncio.sleep(0.5)

    fakes["actor-0"].hooks["update"] = slowly
    await controller.create("r", total_steps=20)
    await until("the first step", lambda: last_step(tmp_path) >= 1)
    redis.process.kill()
    await asyncio.to_thread(redis.process.wait)
    await asyncio.sleep(30)
    without = last_step(tmp_path)
    again = await asyncio.to_thread(embedded.start_redis, tmp_path / "redis", redis.port)
    try:
        run = await controller.end("r")
        assert (run.state, run.reason, run.step) == ("done", "", 20)
        assert without >= 2, "the run went on meanwhile"
        assert applied_once(fakes, 20)
    finally:
        await asyncio.to_thread(again.stop)
