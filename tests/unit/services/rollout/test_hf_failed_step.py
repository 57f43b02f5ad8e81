"""The hf engine when a step fails: who asked before hears of it, who asks meanwhile does not."""

import asyncio
import threading

import pytest
from transformers import AutoTokenizer

from services.rollout.backend import EngineError, SamplingParams
from services.rollout.backends.hf import HfBackend
from tests.fakes.rollout import collect, requests, rollout_config


async def test_rows_that_come_while_a_failed_step_is_cleared_away_are_made(tiny_llama, monkeypatch):
    """Regression: they failed with it, stayed in the engine, and no version could be committed any more."""
    engine = HfBackend()
    await engine.configure(rollout_config(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama), prompt_tokens=40)
    decoder = engine._decoder
    assert decoder is not None
    step, remove = decoder.step, decoder.remove
    clearing, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def failing_step():
        monkeypatch.setattr(decoder, "step", step)
        raise RuntimeError("CUDA error")

    def slow_remove(owner=None):
        if owner is None:
            monkeypatch.setattr(decoder, "remove", remove)
            loop.call_soon_threadsafe(clearing.set)
            go_on.wait(60)
        return remove(owner)

    monkeypatch.setattr(decoder, "step", failing_step)
    monkeypatch.setattr(decoder, "remove", slow_remove)
    params = SamplingParams(max_tokens=4)
    try:
        before = asyncio.create_task(collect(engine.generate(requests(2, params))))
        await asyncio.wait_for(clearing.wait(), 60)
        meanwhile = asyncio.create_task(collect(engine.generate(requests(2, params))))
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(EngineError, match="CUDA error"):
            await before
        assert len(await meanwhile) == 2
        assert not decoder.busy
    finally:
        go_on.set()
        await engine.release()
