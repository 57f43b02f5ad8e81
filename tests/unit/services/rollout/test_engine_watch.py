"""The watch on a rollout's engine: what it calls late, and what becomes of a decoder thread that hangs."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest

from services.rollout import beside as beside_module
from services.rollout import health
from services.rollout.__main__ import build
from services.rollout.health import EngineWatch, standing
from services.rollout.settings import RolloutSettings
from shared.config import dump_config
from shared.gen.sextet.v1 import common_pb2, role_pb2, rollout_pb2, rollout_pb2_grpc
from shared.rpc.client import call
from shared.rpc.errors import FailedPrecondition
from shared.rpc.probe import serving
from shared.state import open_store
from shared.state.registry import list_replicas
from tests.fakes.role import fake_role
from tests.fakes.rollout import rollout_config
from tests.fakes.tiny import write_tiny_llama


@pytest.mark.parametrize(
    ("late", "errors", "wanted"),
    [(0, 0, ""), (2.9, 0, ""), (3.0, 0, "suspect"), (8.9, 0, "suspect"), (9.0, 0, "dead"), (0, 1, "suspect"),
     (0, 2, "dead"), (20, 1, "dead")],
)  # fmt: skip
def test_standing(late: float, errors: int, wanted: str) -> None:
    assert standing(late, 9.0, errors) == wanted


async def _until(condition, seconds=60.0):
    """A condition may be a coroutine function."""
    async with asyncio.timeout(seconds):
        while not (await found if asyncio.iscoroutine(found := condition()) else found):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_engine_at_work_is_not_dead_however_long_its_queue_is(monkeypatch):
    monkeypatch.setattr(health, "PERIOD_SECONDS", 0.01)
    beats, deaths, answers = [0], [], asyncio.Event()

    async def probe() -> str:
        await answers.wait()
        return ""

    async def on_dead() -> None:
        deaths.append(time.monotonic())

    watch = EngineWatch(probe, lambda: beats[0], 4.5)
    task = asyncio.create_task(watch.run(on_dead))
    until = time.monotonic() + 2
    while time.monotonic() < until:
        beats[0] += 1
        await asyncio.sleep(0.02)
    assert (watch.state, watch.fault, deaths) == ("", "", [])
    last_beat = time.monotonic()
    await _until(lambda: watch.state == "suspect")
    assert "has made no token" in watch.fault
    with pytest.raises(FailedPrecondition, match="has made no token"):
        await watch.unless_dead(asyncio.sleep(60))
    assert 4.2 < deaths[0] - last_beat < 30
    answers.set()
    await _until(lambda: watch.state == "")
    assert await watch.unless_dead(asyncio.sleep(0, "done")) == "done"
    task.cancel()


async def test_errors_and_exceptions_of_a_probe_are_faults(monkeypatch):
    monkeypatch.setattr(health, "PERIOD_SECONDS", 0.01)
    deaths: list[str] = []

    async def probe() -> str:
        raise RuntimeError("boom")

    async def on_dead() -> None:
        deaths.append(watch.fault)
        await asyncio.Event().wait()

    watch = EngineWatch(probe, lambda: 0, 9)
    task = asyncio.create_task(watch.run(on_dead))
    await _until(lambda: bool(deaths))
    assert deaths == ["RuntimeError: boom"]
    task.cancel()


async def test_an_engine_that_stands_still_over_new_weights_is_dead_when_their_bytes_are_due(monkeypatch):
    """It is not asked meanwhile; rows that it still makes count as life."""
    monkeypatch.setattr(health, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(health, "COMMIT_BYTES_PER_SECOND", 1000.0)
    beats, deaths, asked = [0], asyncio.Event(), [0]

    async def probe() -> str:
        asked[0] += 1
        return ""

    async def on_dead() -> None:
        deaths.set()
        await asyncio.Event().wait()

    watch = EngineWatch(probe, lambda: beats[0], 0.8)
    assert watch.for_weights(500) == pytest.approx(2.9)
    task = asyncio.create_task(watch.run(on_dead))
    await _until(lambda: asked[0] > 2)
    with watch.excused(watch.for_weights(500)):
        # One that was asked before may still answer.
        await asyncio.sleep(0.05)
        before, started = asked[0], time.monotonic()
        while time.monotonic() - started < 3.5:
            beats[0] += 1
            await asyncio.sleep(0.02)
        assert (asked[0], deaths.is_set()) == (before, False)
        still = time.monotonic()
        with pytest.raises(FailedPrecondition, match=r"stood still for .* over new weights"):
            await watch.unless_dead(asyncio.sleep(60))
        assert time.monotonic() - still > 2.0
    await asyncio.wait_for(deaths.wait(), 60)
    task.cancel()


async def test_what_the_engine_did_before_is_not_counted_against_it(monkeypatch):
    """Weights right after a load of 100 seconds: their time begins with them."""
    clock = [0.0]
    monkeypatch.setattr(health, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def nothing() -> None:
        await asyncio.Event().wait()

    watch = EngineWatch(lambda: asyncio.sleep(0, ""), lambda: 0, 9.0)
    task = asyncio.create_task(watch.run(nothing))
    with watch.excused():
        await asyncio.sleep(0.1)
        clock[0] += 100
    with watch.excused(10):
        clock[0] += 9
        await asyncio.sleep(0.1)
        assert watch.state == ""
        clock[0] += 2
        await _until(lambda: watch.state == "dead")
    task.cancel()


def _operation(name, step=1, part="0"):
    return common_pb2.Operation(id=common_pb2.OperationId(run="r", step=step, name=name, part=part), epoch=1)


@pytest.mark.parametrize("frees", [True, False])
async def test_a_decoder_thread_that_hangs(tmp_path, monkeypatch, frees):
    """Rows are given back within the deadline. If the thread comes back, the replica can be configured anew."""
    monkeypatch.setattr(health, "PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(beside_module, "RELEASE_SECONDS", 60 if frees else 0.5)
    ended, hangs = [], threading.Event()
    monkeypatch.setattr(beside_module, "_end_process", lambda: ended.append(True))
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "data_source": "s"}) + "\n")
    config = dump_config(rollout_config(write_tiny_llama(tmp_path / "m"), "rollout.max_tokens=64", data=str(data)))
    url = f"memory://watch-{frees}"
    async with fake_role(build, RolloutSettings, redis_url=url, threads=1, probe_deadline=3.0) as served:
        request = role_pb2.ConfigureRequest(operation=_operation("configure", 0), config_json=config)
        await call(served.role.Configure, request, timeout=60)
        generate = rollout_pb2.GenerateRequest(
            operation=_operation("generate"), prompts=[rollout_pb2.PromptRow(uid="1:0:0", index=0, samples=[0, 1])]
        )
        stub = rollout_pb2_grpc.RolloutServiceStub(served.channel)
        before = (await call(stub.Generate, generate, timeout=60)).block.digest
        decoder = served.parts.backend._backend._decoder
        real = decoder.step

        def step():
            hangs.wait(100)
            return real()

        decoder.step = step
        # Rows of their own: finished ones are not drawn again.
        again = rollout_pb2.GenerateRequest(
            operation=_operation("generate", part="1"),
            prompts=[rollout_pb2.PromptRow(uid="1:0:1", index=0, samples=[0, 1])],
        )
        started = time.monotonic()
        with pytest.raises(FailedPrecondition, match="has made no token"):
            await call(stub.Generate, again, timeout=60)
        assert time.monotonic() - started < 30
        assert not await asyncio.to_thread(serving, served.endpoint)
        standing = await call(served.role.Describe, role_pb2.DescribeRequest(), timeout=5)
        assert standing.run == ""
        if frees:
            hangs.set()
        store = open_store(url)

        async def stands(wanted):
            return (await list_replicas(store, "rollout"))[0].state == wanted

        if not frees:
            await _until(lambda: bool(ended))
            await _until(lambda: stands("dead"))
            hangs.set()
            return
        await _until(lambda: stands("restarting"))
        # The same operation ids: what was remembered of them went with the engine.
        await call(served.role.Configure, request, timeout=60)
        assert (await call(stub.Generate, generate, timeout=60)).block.digest == before
        await _until(lambda: stands("ready"))
        assert not ended
