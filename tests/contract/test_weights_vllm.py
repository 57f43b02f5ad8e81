"""Weights straight into vLLM's worker processes: tied, fused, sharded; old until commit, then new, cache emptied."""

import contextlib
import dataclasses
import itertools

import pytest
import torch
from transformers import AutoTokenizer

from services.rollout.backend import EngineError, SamplingParams
from services.rollout.weights import Weights, Wire
from shared.gen.sextet.v1 import weights_pb2
from shared.rpc.client import Connections
from shared.rpc.errors import FailedPrecondition
from shared.weights.grpc import GrpcFetcher, GrpcPublisher
from tests.contract.test_weights_sync import Actor
from tests.fakes.role import TOKEN, fake_role
from tests.fakes.rollout import collect, requests, rollout_config
from tests.fakes.tiny import write_tiny_llama

pytest.importorskip("vllm", reason="vLLM is not installed")
from services.rollout.backends.vllm import VllmBackend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
torch.set_num_threads(1)
ROWS = [dataclasses.replace(row, prompt_ids=tuple((3 * k + 5) % 60 + 4 for k in range(30))) for row in
        requests(6, SamplingParams(max_tokens=12, temperature=0.9))]  # fmt: skip
LORA = [f"model.layers.0.self_attn.q_proj.lora_{each}" for each in "AB"]
_numbers = itertools.count()


def off(lm, sample) -> float:
    """How far the log-probs are from the model's own."""
    count = len(sample.response_ids)
    with torch.no_grad():
        logits_TV = lm(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0, -count - 1 : -1]
    wanted_T = torch.log_softmax(logits_TV / 0.9, -1)[torch.arange(count), torch.tensor(sample.response_ids)]
    return float((torch.tensor(sample.logprobs) - wanted_T).abs().max())


@contextlib.asynccontextmanager
async def rollout(model, *overrides: str, keeps: bool = False):
    engine = VllmBackend()
    await engine.configure(rollout_config(model, *overrides), AutoTokenizer.from_pretrained(model), prompt_tokens=40)
    connections = Connections(TOKEN)
    wire = Wire(connections, "m", 30)
    weights = Weights(GrpcFetcher(connections), GrpcPublisher(), 30, wire)
    weights.start("r", keeps)
    try:
        yield engine, weights
    finally:
        weights.stop()
        await connections.close()
        await engine.release()


def gathering() -> weights_pb2.WeightsGathering:
    return weights_pb2.WeightsGathering(id=f"g{next(_numbers)}", members=["m"])


@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_arrives_in_the_workers_is_what_is_served(tmp_path, monkeypatch, ranks):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model = write_tiny_llama(tmp_path / "model", head_dim=32)
    actor = Actor(model, "gloo")
    arguments = f"rollout.engine_args={{max_num_seqs: 8, tensor_parallel_size: {ranks}}}"
    async with fake_role(actor.parts), rollout(model, arguments) as (engine, weights):
        first = await collect(engine.generate(ROWS))
        assert max(off(actor.lm, sample) for sample in first.values()) < 1e-4
        for _ in range(3):
            before = {key: sample.response_ids for key, sample in (await collect(engine.generate(ROWS))).items()}
            ref = actor.train(0.05)
            await weights.prepare(ref, engine, gathering())
            still = {key: sample.response_ids for key, sample in (await collect(engine.generate(ROWS))).items()}
            assert still == before, "prepared is not served"
            await weights.commit(ref.version, ref.digest, engine)
            for sample in (await collect(engine.generate(ROWS))).values():
                assert off(actor.lm, sample) < 1e-4
                assert set(sample.versions) == {ref.version}
        if ranks == 1:
            await refuses(actor, engine, weights, monkeypatch)


async def test_of_adapters_only_they_reach_the_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model = write_tiny_llama(tmp_path / "model", head_dim=32)
    actor = Actor(model, "gloo")
    base = dict(actor.lm.state_dict())
    layer = actor.lm.model.layers[0].self_attn.q_proj
    plain = layer.weight.detach().clone()
    base["model.layers.0.self_attn.q_proj.weight"] = plain
    arguments = "rollout.engine_args={max_num_seqs: 8}"
    async with fake_role(actor.parts), rollout(model, arguments, keeps=True) as (engine, weights):
        for version in (1, 2, 3):
            torch.manual_seed(version)
            a, b = torch.randn(2, plain.shape[1]), 0.1 * torch.randn(plain.shape[0], 2)
            adapters = dict(zip(LORA, (a, b), strict=True))
            ref = actor.publisher.publish(version, base | adapters, run="r", options=actor.options)
            prepared = await weights.prepare(ref, engine, gathering())
            assert prepared.received_bytes == (ref.bytes if version == 1 else a.nbytes + b.nbytes)
            await weights.commit(version, ref.digest, engine)
            with torch.no_grad():
                layer.weight.copy_(plain + b @ a)
            for sample in (await collect(engine.generate(ROWS))).values():
                assert off(actor.lm, sample) < 1e-4
                assert set(sample.versions) == {version}


async def refuses(actor, engine, weights, monkeypatch) -> None:
    """Another architecture, and a commit of what failed."""
    before = {key: sample.response_ids for key, sample in (await collect(engine.generate(ROWS))).items()}
    with torch.no_grad():
        actor.lm.model.norm.register_buffer("more", torch.ones(3))
    ref = actor.train(0.05)
    with pytest.raises(FailedPrecondition, match="has no tensor"):
        await weights.prepare(ref, engine, gathering())
    with pytest.raises(FailedPrecondition, match="goes on serving"):
        await weights.commit(ref.version, ref.digest, engine)
    with pytest.raises(EngineError, match="not prepared"):
        await engine.commit_weights(ref.version)
    assert {key: sample.response_ids for key, sample in (await collect(engine.generate(ROWS))).items()} == before
