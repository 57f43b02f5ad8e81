"""What a rollout has already does not travel again: frozen layers, and everything but the adapters of LoRA."""

import itertools

import pytest
import torch
from transformers import AutoTokenizer

from services.actor.__main__ import build as build_actor
from services.actor.settings import ActorSettings
from services.rollout.__main__ import build
from services.rollout.backends.hf import HfBackend
from services.rollout.settings import RolloutSettings
from shared.config import RunConfig, dump_config
from shared.gen.sextet.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    role_pb2,
    rollout_pb2,
    rollout_pb2_grpc,
    weights_pb2,
)
from shared.rpc.client import call
from tests.contract.test_weights_sync import (
    CHANNELS,
    Actor,
    configuration,
    engine_of,
    fresh,
    greedy,
    operation,
    prepare,
)
from tests.fakes.role import RunningRole, fake_role
from tests.fakes.rollout import rollout_config
from tests.fakes.tiny import write_tiny_llama

torch.set_num_threads(1)
LORA = "actor.lora={rank: 2, alpha: 3, targets: [q_proj, up_proj]}"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("unchanged-model"))


async def configured(role: RunningRole, config: RunConfig) -> None:
    request = role_pb2.ConfigureRequest(operation=operation("configure"), config_json=dump_config(config))
    await call(role.role.Configure, request, timeout=60)


async def sync(rollout: RunningRole, ref: weights_pb2.WeightsRef) -> int:
    """Bytes that travelled."""
    [prepared] = await prepare({"m": rollout}, ref, ["m"])
    assert (prepared.version, prepared.digest) == (ref.version, ref.digest)
    commit = rollout_pb2.CommitWeightsRequest(operation=operation("c"), version=ref.version, digest=ref.digest)
    await call(rollout_pb2_grpc.RolloutServiceStub(rollout.channel).CommitWeights, commit, timeout=60)
    return prepared.received_bytes


@pytest.mark.parametrize(("channel", "only_changed"), [("gloo", True), ("grpc", True), ("grpc", False)])
async def test_a_tensor_travels_only_where_it_changed(model, tmp_path, channel, only_changed):
    configuration(model)
    config = rollout_config(model, f"weights.only_changed={only_changed}", data=str(model / "rows.jsonl"))
    actor = Actor(model, channel)
    norm = actor.lm.model.norm.weight
    async with fake_role(actor.parts), fake_role(build, RolloutSettings, threads=1, replica="m") as rollout:
        await configured(rollout, config)
        ref = actor.train(0.05)
        assert await sync(rollout, ref) == ref.bytes, "of the model as configured, no digests are known"
        changed = norm.nbytes
        for _ in range(3):
            actor.lm.requires_grad_(False)
            norm += 0.1
            ref = actor.train(0.0)
            assert await sync(rollout, ref) == (changed if only_changed else ref.bytes)
            assert await greedy(engine_of(rollout)) == await fresh(model, actor.lm, tmp_path / str(next(_numbers)))
        same = actor.train(0.0)
        assert same.digest == ref.digest
        assert await sync(rollout, same) == (0 if only_changed else ref.bytes)
        assert rollout.parts.backend.version() == same.version
        # Who comes late gets all of it, from a peer, too.
        held = await rollout.parts.backend._weights._fetcher.fetch(same, 30)
        assert sum({id(t): t.nbytes for t in held.values()}.values()) == same.bytes


@pytest.mark.parametrize("channel", CHANNELS)
async def test_of_adapters_only_they_travel_and_what_is_served_is_the_merged_model(model, tmp_path, channel):
    configuration(model)
    config = rollout_config(model, LORA, f"weights.channel={channel}", data=str(model / "rows.jsonl"))
    async with (
        fake_role(build_actor, ActorSettings, threads=1) as actor,
        fake_role(build, RolloutSettings, threads=1, replica="m") as rollout,
    ):
        for role in (actor, rollout):
            await configured(role, config)
        stub = actor_pb2_grpc.ActorServiceStub(actor.channel)
        training = actor.parts.backend._training.of("r").engine
        adapters = {name: p for name, p in training.model.lm.named_parameters() if p.requires_grad}
        before = None
        for number in range(3):
            with torch.no_grad():
                for parameter in adapters.values():
                    parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            publish = actor_pb2.PublishWeightsRequest(operation=operation("actor.publish_weights"))
            ref = (await call(stub.PublishWeights, publish, timeout=60)).weights
            travelled = await sync(rollout, ref)
            assert travelled == (sum(p.nbytes for p in adapters.values()) if number else ref.bytes)
            exported = tmp_path / str(number)
            export = actor_pb2.ExportModelRequest(operation=operation("x"), directory=str(exported))
            await call(stub.ExportModel, export, timeout=60)
            engine = HfBackend()
            await engine.configure(rollout_config(exported), AutoTokenizer.from_pretrained(exported), prompt_tokens=32)
            expected = await greedy(engine)
            await engine.release()
            assert await greedy(engine_of(rollout)) == expected, "in float32 to the bit: the arithmetic is the same"
            assert expected != before, "the adapters matter"
            before = expected
