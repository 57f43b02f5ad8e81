"""The controller as a real process over a real Redis, playing roles in this process: killed, stopped, without Redis."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import from_url

from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.gen.sextet.v1 import controller_pb2_grpc
from shared.rpc.client import Connections, call, stream
from shared.state import StateStore, embedded, open_store
from shared.state.registry import list_replicas
from tests.fakes.ports import kept_port
from tests.fakes.sextet import TOKEN, FakeSextet
from tests.unit.services.controller.conftest import ALL, config

SECONDS = 60


class Process:
    """A controller process; `log` is its standard error."""

    def __init__(self, store: StateStore, url: str, directory: Path) -> None:
        self.store, self.url, self.directory = store, url, directory
        self.connections = Connections(TOKEN)

    async def start(self, *flags: str, failpoints: str = "", **environ: str) -> None:
        environment = {
            **os.environ,
            "SEXTET_TOKEN": TOKEN,
            "SEXTET_REDIS_URL": self.url,
            "SEXTET_PARENT_PID": str(os.getpid()),
            "SEXTET_LEASE_TTL": "1.5",
            "SEXTET_FAILPOINTS": failpoints,
            **environ,
        }
        with (self.directory / "controller.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.controller", "--replica", "controller-0",
                "--runs-dir", str(self.directory / "runs"), *flags,
                env=environment, stderr=log,
            )  # fmt: skip

    async def stub(self) -> Any:
        """A stub of the present process."""
        async with asyncio.timeout(SECONDS):
            while True:
                for entry in await list_replicas(self.store, "controller"):
                    if entry.facts["pid"] == str(self.process.pid):
                        return controller_pb2_grpc.ControllerServiceStub(self.connections.channel(entry.endpoint))
                await asyncio.sleep(0.05)

    async def create(self, id: str, **changes: Any) -> None:
        request = pb.CreateRunRequest(config_json=json.dumps(config(**changes)), id=id)
        await call((await self.stub()).CreateRun, request, timeout=30)

    async def end(self, id: str) -> pb.Run:
        """Waits for the run's end."""
        stub = await self.stub()
        async for _ in stream(stub.WatchRun, pb.WatchRunRequest(id=id), timeout=SECONDS):
            pass
        return (await call(stub.GetRun, pb.GetRunRequest(id=id), timeout=30)).run

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def close(self) -> None:
        await self.connections.close()
        if self.process.returncode is None:
            await self.kill()


@pytest_asyncio.fixture
async def redis(tmp_path: Path) -> AsyncIterator[embedded.EmbeddedRedis]:
    with kept_port() as port:
        server = await asyncio.to_thread(embedded.start_redis, tmp_path / "redis", port)
        yield server
        await asyncio.to_thread(server.stop)


@pytest_asyncio.fixture
async def store(redis: embedded.EmbeddedRedis) -> AsyncIterator[StateStore]:
    store = open_store(redis.url)
    yield store
    await store.close()


@pytest_asyncio.fixture
async def fakes(store: StateStore) -> AsyncIterator[FakeSextet]:
    sextet = FakeSextet(store)
    await sextet.start(*ALL)
    yield sextet
    await sextet.close()


@pytest_asyncio.fixture
async def controller(store: StateStore, redis: embedded.EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(store, redis.url, tmp_path)
    await process.start()
    yield process
    await process.close()


def holding(fakes: FakeSextet, step: int) -> tuple[asyncio.Event, asyncio.Event]:
    """The actor's update of that step waits: (reached, go on)."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold(request: Any) -> None:
        if request.operation.id.step == step:
            reached.set()
            await go_on.wait()

    fakes["actor-0"].hooks["update"] = hold
    return reached, go_on


def applied_once(fakes: FakeSextet, steps: int) -> bool:
    return fakes["actor-0"].done["update"] == steps and set(fakes["actor-0"].rows["update"].values()) == {1}


async def test_killed_and_started_again_it_goes_on_within_seconds(fakes: FakeSextet, controller: Process) -> None:
    reached, go_on = holding(fakes, 2)
    await controller.create("r", total_steps=4)
    await asyncio.wait_for(reached.wait(), SECONDS)
    await controller.kill()
    # As after a crash of some seconds: the leader's lease has run out.
    await asyncio.sleep(2)
    go_on.set()
    await controller.start()
    run = await controller.end("r")
    assert (run.state, run.reason, run.step) == ("done", "", 4)
    assert applied_once(fakes, 4)
    assert json.loads(Path(run.directory, "summary.json").read_text())["steps"] == 4  # noqa: ASYNC240
    log = [json.loads(line) for line in (controller.directory / "controller.log").read_text().splitlines()]
    since = [index for index, line in enumerate(log) if line["event"] == "leadership"][-1]
    leads, recovered = log[since], next(line for line in log[since:] if line.get("kind") == "recovery")
    # 2 s where it has a core to itself.
    assert seconds_between(leads["timestamp"], recovered["timestamp"]) < 8


async def test_sigterm_ends_it_at_once_and_the_run_goes_on_with_the_next(
    fakes: FakeSextet, controller: Process
) -> None:
    reached, go_on = holding(fakes, 2)
    await controller.create("r")
    await asyncio.wait_for(reached.wait(), SECONDS)
    started = time.monotonic()
    controller.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(controller.process.wait(), 60) == 0
    assert time.monotonic() - started < 18, "it waits for nothing: less than `drain_timeout`"
    go_on.set()
    await controller.start()
    assert (await controller.end("r")).state == "done"
    assert applied_once(fakes, 3)


async def test_redis_is_killed_and_comes_back_in_a_run(
    fakes: FakeSextet, controller: Process, redis: embedded.EmbeddedRedis, tmp_path: Path
) -> None:
    reached, go_on = holding(fakes, 2)
    await controller.create("r")
    await asyncio.wait_for(reached.wait(), SECONDS)
    redis.process.kill()
    await asyncio.to_thread(redis.process.wait)
    go_on.set()
    await asyncio.sleep(3)
    again = await asyncio.to_thread(embedded.start_redis, tmp_path / "redis", redis.port)
    assert again.url == redis.url
    try:
        run = await controller.end("r")
        assert (run.state, run.reason, run.step) == ("done", "", 3)
        assert applied_once(fakes, 3)
    finally:
        await asyncio.to_thread(again.stop)


async def test_redis_is_emptied_in_a_run(fakes: FakeSextet, controller: Process, redis: embedded.EmbeddedRedis) -> None:
    reached, go_on = holding(fakes, 2)
    await controller.create("r")
    await asyncio.wait_for(reached.wait(), SECONDS)
    async with from_url(redis.url) as client:
        await client.flushall()
    go_on.set()
    await asyncio.sleep(1)
    run = await controller.end("r")
    assert (run.state, run.step) == ("done", 3)
    await controller.create("next", total_steps=1)
    assert (await controller.end("next")).state == "done"


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--redis", "redis://127.0.0.1:1/0"), 3, "127.0.0.1:1"),
        (("--http", "nowhere"), 2, "--http nowhere"),
        (("--runs", "x"), 2, "--runs-dir"),
    ],
)
async def test_what_cannot_start_says_why_and_leaves(tmp_path: Path, flags: Any, code: int, words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.controller", *flags,
        env={**os.environ, "SEXTET_TOKEN": TOKEN, "SEXTET_REDIS_URL": "memory://x"}, cwd=tmp_path, stderr=-1,
    )  # fmt: skip
    with contextlib.suppress(ProcessLookupError):
        _, text = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == code
    assert words in text.decode()


def seconds_between(start: str, end: str) -> float:
    from datetime import datetime

    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
