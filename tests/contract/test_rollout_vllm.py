"""What only the vllm engine can get wrong: its log-probs, its tied head, its prefix cache, its processes."""

import asyncio
import dataclasses
import os
import signal
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.rollout.backend import EngineError, SamplingParams
from tests.fakes.rollout import collect, requests, rollout_config
from tests.fakes.tiny import write_tiny_llama

pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from services.rollout.backends.vllm import VllmBackend
from services.rollout.backends.vllm_start import engine_args, start_engine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
torch.set_num_threads(1)
# Prompts are longer than a batch may be: they are prefilled in chunks.
ARGUMENTS = "rollout.engine_args={max_num_seqs: 8, max_num_batched_tokens: 16}"
ROWS = [
    dataclasses.replace(row, prompt_ids=tuple((3 * k + len(row.prompt_ids)) % 60 + 4 for k in range(40)))
    for row in requests(12, SamplingParams())
]
DRAWS = {
    "plain": SamplingParams(max_tokens=16),
    "warm": SamplingParams(max_tokens=16, temperature=1.7),
    "top_p": SamplingParams(max_tokens=16, temperature=0.6, top_p=0.7),
    "top_k": SamplingParams(max_tokens=16, top_k=3),
    "min_tokens": SamplingParams(max_tokens=16, min_tokens=8, stop_token_ids=tuple(range(4, 34))),
    "greedy": SamplingParams(max_tokens=16, temperature=0.8, greedy=True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("rollout-vllm"), head_dim=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model):
    backend = VllmBackend()
    await backend.configure(rollout_config(model, ARGUMENTS), AutoTokenizer.from_pretrained(model), prompt_tokens=40)
    yield backend
    await backend.release()


def _off(lm, sample, temperature):
    count = len(sample.response_ids)
    with torch.no_grad():
        logits_TV = lm(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0, -count - 1 : -1]
    wanted_T = torch.log_softmax(logits_TV / temperature, -1)[torch.arange(count), torch.tensor(sample.response_ids)]
    return float((torch.tensor(sample.logprobs) - wanted_T).abs().max())


def _engine_processes():
    # What tests before this one have left unreaped has no command line.
    children = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


async def _until_gone(processes, seconds=10.0):
    """A killed process takes a moment; one that nobody has reaped is gone, too."""
    for _ in range(int(seconds / 0.1)):
        left = [(p.pid, p.name()) for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not left:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"still there: {left}")


async def test_log_probs_are_the_models_before_and_after_updates_of_a_tied_model(engine, model):
    lm = AutoModelForCausalLM.from_pretrained(model)
    generator = torch.Generator().manual_seed(0)
    for version in range(4):
        if version:
            with torch.no_grad():
                for parameter in lm.parameters():
                    parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
            await engine.prepare_weights(version, dict(lm.named_parameters()))
            await engine.commit_weights(version)
        for name, params in DRAWS.items():
            rows = [dataclasses.replace(row, params=params) for row in ROWS]
            for sample in (await collect(engine.generate(rows))).values():
                assert _off(lm, sample, params.temperature) < 1e-4, (name, version)
                assert set(sample.versions) == {version}


async def test_seeds_hold_in_chunked_prefill(engine):
    rows = [dataclasses.replace(row, params=DRAWS["plain"]) for row in ROWS]
    together = await collect(engine.generate(rows))
    alone = {}
    for row in rows[:4]:
        alone |= await collect(engine.generate([row]))
    assert {key: sample.response_ids for key, sample in alone.items()} == {
        key: together[key].response_ids for key in alone
    }


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("max_num_seq: 4", "no such engine argument; did you mean 'max_num_seqs'"),
        ("model: other", "set model.path"),
        ("trust_remote_code: true", "never run"),
        ("logprobs_mode: raw_logits", "at the temperature"),
    ],
)
async def test_engine_arguments_are_checked_by_name(model, argument, told):
    with pytest.raises(EngineError, match=told):
        engine_args(rollout_config(model, f"rollout.engine_args={{{argument}}}"), 64)


def test_a_temperature_that_vllm_would_raise_is_refused(model):
    with pytest.raises(EngineError, match=r"rollout.temperature=0.005: vLLM samples at 0.01 at least"):
        engine_args(rollout_config(model, "rollout.temperature=0.005"), 64)
    assert engine_args(rollout_config(model, "rollout.temperature=0.01"), 64)


def test_a_step_takes_as_many_rows_and_tokens_as_llm_generates(model, monkeypatch) -> None:
    def configured(_: type, arguments: EngineArgs, usage_context: UsageContext = UsageContext.ENGINE_CONTEXT) -> Any:
        return arguments.create_engine_config(usage_context).scheduler_config

    monkeypatch.setattr(AsyncLLM, "from_engine_args", classmethod(configured))
    wanted = EngineArgs(str(model), skip_tokenizer_init=True).create_engine_config(UsageContext.LLM_CLASS)
    found = start_engine(rollout_config(model), 64)
    assert found.max_num_seqs == wanted.scheduler_config.max_num_seqs > 128
    assert found.max_num_batched_tokens == wanted.scheduler_config.max_num_batched_tokens > 2048


async def test_unpickling_is_refused(model, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with pytest.raises(EngineError, match="unset it"):
        await VllmBackend().configure(rollout_config(model), None, prompt_tokens=8)


async def test_a_full_key_value_cache_costs_time_and_no_sample(engine, model):
    tokenizer, draw = AutoTokenizer.from_pretrained(model), dataclasses.replace(DRAWS["plain"], max_tokens=24)
    rows = [dataclasses.replace(row, params=draw) for row in ROWS]
    lm = AutoModelForCausalLM.from_pretrained(model)
    await engine.prepare_weights(9, dict(lm.named_parameters()))
    await engine.commit_weights(9)
    roomy = await collect(engine.generate(rows))
    narrow = VllmBackend()
    # Five blocks of 32 tokens, and rows of 64: two of the twelve at a time.
    blocks = "rollout.engine_args={max_num_seqs: 8, block_size: 32, num_gpu_blocks_override: 6}"
    try:
        await narrow.configure(rollout_config(model, blocks), tokenizer, prompt_tokens=40)
        found = await asyncio.wait_for(collect(narrow.generate(rows)), 120)
        assert {key: sample.response_ids for key, sample in found.items()} == {
            key: sample.response_ids for key, sample in roomy.items()
        }
        with pytest.raises(EngineError, match="vLLM does not start"):
            await narrow.configure(rollout_config(model, blocks.replace("6", "2")), tokenizer, prompt_tokens=40)
    finally:
        await narrow.release()


async def test_an_engine_that_stands_still_and_one_that_is_killed(engine, model, monkeypatch):
    # The last test of this file: it leaves no engine behind.
    monkeypatch.setattr(engine, "silence", 1.0)
    monkeypatch.setattr(engine, "patience", 1.0)
    children = _engine_processes()
    running = asyncio.create_task(collect(engine.generate(ROWS)))
    for child in children:
        os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="has not answered"):
        await asyncio.wait_for(running, 20)
    assert "has not answered" in await engine.health()
    with pytest.raises(EngineError, match="has not answered"):
        await collect(engine.generate(ROWS))
    await asyncio.wait_for(engine.release(), 60)
    await _until_gone(children)
    monkeypatch.undo()
    await engine.configure(rollout_config(model, ARGUMENTS), AutoTokenizer.from_pretrained(model), prompt_tokens=40)
    running = asyncio.create_task(collect(engine.generate(ROWS)))
    for child in _engine_processes():
        child.kill()
    with pytest.raises(EngineError, match="died"):
        await asyncio.wait_for(running, 20)
    assert "died" in await engine.health()


def test_what_is_set_for_the_engine_is_known_to_it() -> None:
    """A misspelt variable is only a line in vLLM's log, and the engine is forked from a process with gRPC's threads."""
    from vllm import envs

    from services.rollout.backends.vllm_start import ENVIRONMENT

    unknown = {name for name in ENVIRONMENT if name.startswith("VLLM_") and name not in envs.environment_variables}
    assert not unknown
