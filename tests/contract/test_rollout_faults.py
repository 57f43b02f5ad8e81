"""What must end well on either engine, over a real server: too many requests, callers that leave, a run not loaded."""

import asyncio
import importlib.util
import json

import psutil
import pytest
import torch

from services.rollout import role
from services.rollout.__main__ import build
from services.rollout.settings import RolloutSettings
from shared.gen.sextet.v1 import rollout_pb2, rollout_pb2_grpc
from shared.rpc.client import call
from shared.rpc.errors import DeadlineExceeded, FailedPrecondition, ResourceExhausted
from tests.contract.test_rollout_service import _configure, _operation
from tests.fakes.role import fake_role
from tests.fakes.rollout import rollout_config
from tests.fakes.tiny import write_tiny_llama

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(600)
ENGINES = [
    "hf",
    pytest.param(
        "vllm", marks=pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
    ),
]
MANY = 10_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("faults-model"), head_dim=32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults-data") / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + {i}="}) + "\n" for i in range(16)))
    return str(path)


def _config(model, data, engine, *overrides):
    arguments = ["rollout.engine_args={max_num_seqs: 64}"] if engine == "vllm" else ["rollout.slots=64"]
    return rollout_config(model, f"rollout.engine={engine}", *arguments, *overrides, data=data)


def _request(number, samples=1, run="r"):
    prompt = rollout_pb2.PromptRow(uid=f"1:{number}:0", index=number % 16, samples=range(samples))
    return rollout_pb2.GenerateRequest(operation=_operation("rollout.generate", run=run), prompts=[prompt])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
async def test_ten_thousand_requests_at_once_are_answered_or_refused_in_bounded_memory(model, data, engine):
    async with fake_role(build, RolloutSettings, threads=1, probe_deadline=60) as served:
        await _configure(served, _config(model, data, engine, "rollout.max_tokens=1"))
        generate = rollout_pb2_grpc.RolloutServiceStub(served.channel).Generate
        await call(generate, _request(0), timeout=60)
        before = psutil.Process().memory_info().rss
        calls = [call(generate, _request(number), timeout=300) for number in range(1, MANY + 1)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        answered = [each for each in outcomes if isinstance(each, rollout_pb2.GenerateResponse)]
        refused = [each for each in outcomes if isinstance(each, ResourceExhausted)]
        print(f"{engine}: {len(answered)} answered, {len(refused)} refused")
        assert len(answered) + len(refused) == MANY, {type(each) for each in outcomes}
        assert answered
        assert all(each.metrics["response_tokens"] == 1 for each in answered)
        assert psutil.Process().memory_info().rss - before < 2**30
        assert (await call(generate, _request(MANY + 1), timeout=60)).metrics["response_tokens"] == 1


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_caller_that_goes_away_finds_the_samples_when_it_comes_back(model, data, engine):
    async with fake_role(build, RolloutSettings, threads=1) as served:
        await _configure(served, _config(model, data, engine))
        generate, request = rollout_pb2_grpc.RolloutServiceStub(served.channel).Generate, _request(0, samples=400)
        with pytest.raises(DeadlineExceeded):
            await call(generate, request, timeout=0.05)
        answer = await call(generate, request, timeout=120)
        assert len(answer.block.rows) == 400
        again = await call(generate, request, timeout=5)
        assert again.block == answer.block


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_run_that_is_not_loaded_is_refused_and_the_loaded_one_goes_on(model, data, engine):
    async with fake_role(build, RolloutSettings, threads=1) as served:
        await _configure(served, _config(model, data, engine))
        generate = rollout_pb2_grpc.RolloutServiceStub(served.channel).Generate
        running = asyncio.create_task(call(generate, _request(0, samples=64), timeout=60))
        with pytest.raises(FailedPrecondition, match="for run 'r' and holds no verified weights of run 'x'"):
            await call(generate, _request(0, run="x"), timeout=30)
        assert len((await running).block.rows) == 64


async def test_more_rows_than_may_be_in_progress_are_refused_and_told_how_many(model, data, monkeypatch):
    monkeypatch.setattr(role, "MAX_ROWS", 100)
    async with fake_role(build, RolloutSettings, threads=1) as served:
        await _configure(served, _config(model, data, "hf"))
        generate = rollout_pb2_grpc.RolloutServiceStub(served.channel).Generate
        # One call may have more: it could never be done otherwise.
        running = asyncio.create_task(call(generate, _request(0, samples=400), timeout=60))
        while not served.parts.backend._rows:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        with pytest.raises(ResourceExhausted, match="400 rows are in progress: 1 more would be over 100"):
            await call(generate, _request(1), timeout=60)
        assert len((await running).block.rows) == 400
        assert len((await call(generate, _request(2), timeout=60)).block.rows) == 1
