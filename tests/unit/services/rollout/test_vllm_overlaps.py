"""Calls of the vllm engine that meet: rows and a version, and a version that is let go of while it is written."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.rollout.backend import EngineError, SamplingParams
from services.rollout.backends import vllm as module
from services.rollout.backends.vllm import VllmBackend
from services.rollout.backends.vllm_weights import WeightsFile
from tests.fakes.rollout import collect, requests, rollout_config
from tests.fakes.tiny import write_tiny_llama
from tests.fakes.vllm import FakeVllm, fake_vllm

ROWS = requests(2, SamplingParams(max_tokens=3))


@pytest_asyncio.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return fake_vllm(monkeypatch)


@pytest_asyncio.fixture
async def backend(engine: FakeVllm, tmp_path: Path) -> AsyncIterator[VllmBackend]:
    backend = VllmBackend()
    await backend.configure(rollout_config(write_tiny_llama(tmp_path / "m"), "rollout.engine=vllm"), None, 40)
    yield backend
    await backend.release()


async def test_a_version_waits_for_rows_that_came_just_before_it(backend: VllmBackend, engine: FakeVllm) -> None:
    """Regression: they were sampled with the new weights and said that they were of the old ones."""
    await backend.prepare_weights(1, None)
    sampling = asyncio.create_task(collect(backend.generate(ROWS)))
    committing = asyncio.create_task(backend.commit_weights(1))
    samples = await sampling
    await committing
    assert engine.done == ["row", "row", "load"]
    assert {version for sample in samples.values() for version in sample.versions} == {0}


async def test_an_engine_whose_rows_a_version_waits_for_shows_that_it_lives(
    backend: VllmBackend, engine: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: rows that took longer than the version's bytes made the watch take the engine for dead."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    await backend.prepare_weights(1, None)
    engine.gate.clear()
    sampling = asyncio.create_task(collect(backend.generate(ROWS)))
    committing = asyncio.create_task(backend.commit_weights(1))
    before = backend.beats
    try:
        async with asyncio.timeout(20):
            while backend.beats < before + 2:  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0.01)
    finally:
        engine.gate.set()
        await asyncio.gather(sampling, committing)


async def test_a_version_does_not_wait_for_rows_that_were_given_up_before_they_began(backend: VllmBackend) -> None:
    await backend.prepare_weights(1, None)
    sampling = asyncio.create_task(collect(backend.generate(ROWS)))
    asyncio.get_running_loop().call_soon(sampling.cancel)
    await asyncio.wait({sampling})
    await asyncio.wait_for(backend.commit_weights(1), 60)


@pytest.mark.parametrize("end", ["release", "cancel"])
async def test_a_version_that_nobody_wants_once_it_is_written_leaves_memory(
    backend: VllmBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Regression: a file as large as the model stayed in memory, even after the process."""
    writing, go_on, path = asyncio.Event(), threading.Event(), tmp_path / "weights" / "1.safetensors"
    loop, removed = asyncio.get_running_loop(), asyncio.Event()

    class Watched(WeightsFile):
        def remove(self) -> None:
            super().remove()
            removed.set()

    def write(version: int, *_: Any) -> WeightsFile:
        loop.call_soon_threadsafe(writing.set)
        go_on.wait(60)
        path.parent.mkdir()
        path.write_bytes(b"weights")
        return Watched(version, str(path))

    monkeypatch.setattr(module, "write_weights", write)
    preparing = asyncio.create_task(backend.prepare_weights(1, {}))
    await writing.wait()
    if end == "release":
        await backend.release()
    else:
        preparing.cancel()
    go_on.set()
    with pytest.raises(EngineError if end == "release" else asyncio.CancelledError):
        await preparing
    await asyncio.wait_for(removed.wait(), 20)
    assert not path.parent.exists()
