"""Weights from an actor to rollouts that serve: over every channel, what is served is what was exported."""

import asyncio
import contextlib
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.actor.__main__ import build as build_actor
from services.actor.settings import ActorSettings
from services.rollout.__main__ import build
from services.rollout.backend import SamplingParams
from services.rollout.backends.hf import HfBackend
from services.rollout.settings import RolloutSettings
from shared.config import WeightsConfig, dump_config
from shared.gen.sextet.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    common_pb2,
    role_pb2,
    rollout_pb2,
    rollout_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)
from shared.rpc.client import call
from shared.rpc.errors import FailedPrecondition
from shared.rpc.run import RoleParts
from shared.weights import gather
from shared.weights.gather import Gatherings
from shared.weights.grpc import GrpcPublisher, WeightsServicer
from tests.fakes.role import FakeBackend, fake_role
from tests.fakes.rollout import collect, requests, rollout_config
from tests.fakes.tiny import write_tiny_llama

torch.set_num_threads(1)
CHANNELS = ["gloo", "grpc"]
GREEDY = requests(6, SamplingParams(max_tokens=10, greedy=True))
_parts = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("weights-model"))


class Actor:
    """Holds a policy and publishes it, as the actor service does."""

    def __init__(self, model, channel: str) -> None:
        self.lm = AutoModelForCausalLM.from_pretrained(model)
        self.options = WeightsConfig(channel=channel, timeout=20, bucket_mib=1)
        self.publisher, self.gatherings, self.version = GrpcPublisher(), Gatherings(), 0

    def train(self, rate: float) -> weights_pb2.WeightsRef:
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.lm.parameters():
                parameter += rate * torch.randn(parameter.shape, generator=generator)
        return self.publisher.publish(self.version, self.lm.state_dict(), run="r", options=self.options)

    def parts(self, context) -> RoleParts:
        servicer = WeightsServicer(self.publisher, self.gatherings)
        return RoleParts(
            FakeBackend(),
            [(weights_pb2_grpc.add_WeightsServiceServicer_to_server, servicer)],
            [],
            on_bound=lambda endpoint: setattr(self.publisher, "endpoint", endpoint),
            on_stopped=self.gatherings.close,
        )


@contextlib.asynccontextmanager
async def cluster(model, channel: str, rollouts: int = 2):
    """An actor and rollouts that serve version 0."""
    actor = Actor(model, channel)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(fake_role(actor.parts))
        served = {}
        for number in range(rollouts):
            name = f"rollout-{number}"
            role = await stack.enter_async_context(fake_role(build, RolloutSettings, threads=1, replica=name))
            request = role_pb2.ConfigureRequest(
                operation=operation("rollout.configure"), config_json=dump_config(configuration(model))
            )
            await call(role.role.Configure, request, timeout=60)
            served[name] = role
        yield actor, served


def configuration(model):
    path = model / "rows.jsonl"
    path.write_text('{"prompt": [{"role": "user", "content": "1+1="}], "data_source": "s", "reward_model": {}}\n')
    return rollout_config(model, data=str(path))


def operation(name: str) -> common_pb2.Operation:
    return common_pb2.Operation(id=common_pb2.OperationId(run="r", step=1, name=name, part=str(next(_parts))), epoch=1)


async def prepare(served, ref, members) -> list:
    gathering = weights_pb2.WeightsGathering(id=f"g{next(_parts)}", members=members) if ref.offers else None
    stubs = {name: rollout_pb2_grpc.RolloutServiceStub(role.channel) for name, role in served.items()}
    return await asyncio.gather(
        *(
            call(
                stub.PrepareWeights,
                rollout_pb2.PrepareWeightsRequest(operation=operation("p"), weights=ref, gathering=gathering),
                timeout=60,
            )
            for stub in stubs.values()
        ),
        return_exceptions=True,
    )


async def sync(served, ref) -> None:
    for answer in await prepare(served, ref, list(served)):
        assert not isinstance(answer, Exception), answer
        assert (answer.version, answer.digest) == (ref.version, ref.digest)
    for role in served.values():
        request = rollout_pb2.CommitWeightsRequest(operation=operation("c"), version=ref.version, digest=ref.digest)
        await call(rollout_pb2_grpc.RolloutServiceStub(role.channel).CommitWeights, request, timeout=60)


async def greedy(engine) -> dict:
    """Tokens and log-probs to the bit."""
    return {key: (s.response_ids, s.logprobs) for key, s in (await collect(engine.generate(GREEDY))).items()}


async def fresh(model, lm, directory):
    """What a new engine makes of the exported weights."""
    lm.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model).save_pretrained(directory)
    engine = HfBackend()
    await engine.configure(rollout_config(directory), AutoTokenizer.from_pretrained(directory), prompt_tokens=32)
    answers = await greedy(engine)
    await engine.release()
    return answers


def engine_of(role):
    return role.parts.backend._backend


@pytest.mark.parametrize("channel", CHANNELS)
async def test_after_every_sync_a_rollout_is_a_fresh_engine_with_the_exported_weights(model, tmp_path, channel):
    async with cluster(model, channel) as (actor, served):
        before = None
        for version in range(1, 4):
            await sync(served, actor.train(0.05))
            expected = await fresh(model, actor.lm, tmp_path / str(version))
            for role in served.values():
                assert await greedy(engine_of(role)) == expected
            assert expected != before, "the weights matter"
            before = expected


async def test_two_hundred_syncs_of_the_same_weights_change_nothing(model):
    async with cluster(model, "gloo", rollouts=1) as (actor, served):
        [role] = served.values()
        before = await greedy(engine_of(role))
        digests = set()
        for _ in range(200):
            ref = actor.train(0.0)
            digests.add(ref.digest)
            await sync(served, ref)
        assert len(digests) == 1
        assert await greedy(engine_of(role)) == before
        assert engine_of(role)._decoder.version == 200


async def test_cut_at_every_bucket_the_old_version_serves_and_then_the_new_one(model, monkeypatch):
    monkeypatch.setattr(gather, "CPU_BUCKET", 12 << 10)
    async with cluster(model, "gloo") as (actor, served):
        await sync(served, actor.train(0.05))
        before = [await greedy(engine_of(role)) for role in served.values()]
        ref, bucket = actor.train(0.05), 0
        while bucket < 20:
            monkeypatch.setenv("SEXTET_FAILPOINTS", f"weights.bucket.{bucket}=error")
            outcomes = await prepare(served, ref, list(served))
            if not any(isinstance(outcome, Exception) for outcome in outcomes):
                break
            for outcome in outcomes:
                assert isinstance(outcome, FailedPrecondition)
                assert "FailpointError" in str(outcome)
            assert [await greedy(engine_of(role)) for role in served.values()] == before
            bucket += 1
        assert 5 < bucket < 20, "it was cut at each of several buckets"
        monkeypatch.setenv("SEXTET_FAILPOINTS", "rollout.commit=error")
        with pytest.raises(Exception, match="failpoint"):
            await sync(served, ref)
        assert [await greedy(engine_of(role)) for role in served.values()] == before
        monkeypatch.setenv("SEXTET_FAILPOINTS", "")
        await sync(served, ref)
        assert [await greedy(engine_of(role)) for role in served.values()] != before


async def test_who_was_not_in_the_gathering_streams_the_version(model):
    async with cluster(model, "gloo") as (actor, served):
        late = {"rollout-1": served.pop("rollout-1")}
        ref = actor.train(0.05)
        await sync(served, ref)
        alone = weights_pb2.WeightsRef()
        alone.CopyFrom(ref)
        del alone.offers[:]
        await sync(late, alone)
        one, other = next(iter(served.values())), late["rollout-1"]
        assert await greedy(engine_of(one)) == await greedy(engine_of(other))


async def test_an_actor_that_was_restarted_is_joined_anew(model):
    async with cluster(model, "gloo") as (actor, served):
        await sync(served, actor.train(0.05))
        again = Actor(model, "gloo")
        again.version = 7
        async with fake_role(again.parts):
            await sync(served, again.train(0.05))
            assert {engine_of(role)._decoder.version for role in served.values()} == {8}


async def test_the_actor_service_offers_what_the_configuration_says_and_sends(model):
    settings = rollout_config(model, "weights.channel=gloo", data=str(model / "rows.jsonl"))
    configuration(model)
    async with (
        fake_role(build_actor, ActorSettings, threads=1) as actor,
        fake_role(build, RolloutSettings, threads=1, replica="m") as rollout,
    ):
        for role, name in ((actor, "actor.configure"), (rollout, "rollout.configure")):
            request = role_pb2.ConfigureRequest(operation=operation(name), config_json=dump_config(settings))
            await call(role.role.Configure, request, timeout=60)
        publish = actor_pb2.PublishWeightsRequest(operation=operation("actor.publish_weights"))
        published = await call(actor_pb2_grpc.ActorServiceStub(actor.channel).PublishWeights, publish, timeout=60)
        assert list(published.weights.offers) == ["gloo"]
        await sync({"m": rollout}, published.weights)
        assert rollout.parts.backend._weights._wire._part.holds, "it came over the wire"
