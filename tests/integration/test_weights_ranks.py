"""An actor of two ranks and rollouts, all of them processes: every rank sends its shards, and none holds the model."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.rollout.__main__ import build
from services.rollout.settings import RolloutSettings
from shared.batch import refs
from shared.config import RunConfig
from shared.config_loading import load_config
from shared.gen.sextet.v1 import actor_pb2, actor_pb2_grpc, rollout_pb2, rollout_pb2_grpc, weights_pb2
from shared.rpc.client import call
from tests.contract.test_training_group import Client, group, serving
from tests.fakes.role import RunningRole, fake_role
from tests.fakes.tiny import write_tiny_llama
from tests.fakes.training import roll_out, score

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
torch.set_num_threads(1)
PROMPTS = ["1+1=", "ab", "2*3-1="]


def config_of(model: Path, data: Path, channel: str, kind: str) -> RunConfig:
    rows = [{"prompt": [{"role": "user", "content": p}], "data_source": "s", "reward_model": {}} for p in PROMPTS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "model": {"path": str(model), "device": "cpu"},
        "data": {"path": str(data), "max_prompt_tokens": 32},
        "reward": {"function": "none:none"},
        "total_steps": 1,
        "rollout": {"n": 2, "max_tokens": 8, "slots": 4, "engine": "hf"},
        "actor": {"micro_batch_size": 3, "mini_batch_size": 4, "optimizer": {"lr": 1e-2}},
        "algorithm": {"advantage": "grpo", "kl": {"placement": "none"}},
        "weights": {"channel": channel, "timeout": 60, "bucket_mib": 1},
    }
    if kind == "lora":
        tree["actor"]["lora"] = {"rank": 2, "targets": ["q_proj", "down_proj"]}
    if kind == "stages":
        tree["actor"]["parallel"] = {"pp": 2}
    return load_config(tree)


class Rollout:
    """A rollout as the controller sees it."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name = client, name
        self.stub = rollout_pb2_grpc.RolloutServiceStub(client.channel)

    async def prepare(self, ref: weights_pb2.WeightsRef, together: weights_pb2.WeightsGathering | None) -> None:
        request = rollout_pb2.PrepareWeightsRequest(
            operation=self.client.operation("p"), weights=ref, gathering=together
        )
        prepared = await call(self.stub.PrepareWeights, request, timeout=60)
        assert (prepared.version, prepared.digest) == (ref.version, ref.digest)

    async def commit(self, ref: weights_pb2.WeightsRef) -> None:
        request = rollout_pb2.CommitWeightsRequest(
            operation=self.client.operation("c"), version=ref.version, digest=ref.digest
        )
        await call(self.stub.CommitWeights, request, timeout=60)

    async def greedy(self) -> list[list[float]]:
        """Tokens and log-probs of all rows, to the bit."""
        rows = [rollout_pb2.PromptRow(uid=f"p{n}", index=n, samples=[0]) for n in range(len(PROMPTS))]
        request = rollout_pb2.GenerateRequest(operation=self.client.operation("g"), prompts=rows, greedy=True)
        made = await call(self.stub.Generate, request, timeout=60)
        block = await self.client.read(made.block)
        return [block[name].data.tolist() for name in ("response_ids", "rollout_logprobs")]


async def sync(rollouts: list[Rollout], ref: weights_pb2.WeightsRef) -> None:
    names = [rollout.name for rollout in rollouts]
    together = weights_pb2.WeightsGathering(id=f"g{ref.version}", members=names) if ref.offers else None
    await asyncio.gather(*(rollout.prepare(ref, together) for rollout in rollouts))
    await asyncio.gather(*(rollout.commit(ref) for rollout in rollouts))


async def fresh(model: Path, config: RunConfig, others: RunningRole) -> list[list[float]]:
    """What a new engine makes of the exported model."""
    tree = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    async with fake_role(build, RolloutSettings, threads=1, replica="fresh") as role:
        client = Client(role.endpoint, others)
        await client.configure(tree)
        return await Rollout(client, "fresh").greedy()


async def train(actor: Client, model: Path, step: int) -> None:
    """One update, from samples of the model as it was at the start."""
    inputs = actor.put(samples := roll_out(model, prompts=4))
    kind = actor_pb2.ActorServiceComputeLogprobsRequest
    old = await actor.act("ComputeLogprobs", kind, "actor.logprobs", inputs=inputs)
    joined = refs.merge(inputs, actor.put(score(samples, lambda ids: float(ids.mean()))), old.block)
    advantages = await actor.act("ComputeAdvantages", actor_pb2.ComputeAdvantagesRequest, "a", inputs=joined)
    request = actor_pb2.ActorServiceUpdateRequest(
        operation=actor.operation("actor.update", step), inputs=refs.merge(advantages.block)
    )
    await call(actor_pb2_grpc.ActorServiceStub(actor.channel).Update, request, timeout=60)


@pytest.mark.parametrize(
    ("channel", "rollouts", "kind"),
    [
        ("gloo", 1, "lora"),
        ("gloo", 2, "shards"),
        ("gloo", 1, "stages"),
        ("grpc", 1, "shards"),
        ("grpc", 1, "lora"),
        ("grpc", 1, "stages"),
    ],
)
async def test_rollouts_serve_what_two_ranks_hold_together(
    tmp_path: Path, channel: str, rollouts: int, kind: str
) -> None:
    model = write_tiny_llama(tmp_path / "model", tied=kind != "stages")
    config = config_of(model, tmp_path / "rows.jsonl", channel, kind)
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(rollouts):
            home = tmp_path / f"m{number}"
            home.mkdir()
            started.append(stack.enter_context(group("rollout", home, "--replica", home.name, ranks=1)))
        async with serving("actor", tmp_path) as (process, actor):
            ranks = "2 stages x 1 copies x 1 shards " if kind == "stages" else "1 copies x 2 shards "
            assert (await actor.configure(config)).facts["ranks"].startswith(ranks)
            served = [Rollout(Client(each.endpoint, actor.others), f"m{n}") for n, each in enumerate(started)]
            for rollout in served:
                await rollout.client.configure(config)
            before = await served[0].greedy()
            for number in range(2):
                await train(actor, model, number + 1)
                published = await actor.act("PublishWeights", actor_pb2.PublishWeightsRequest, "actor.publish_weights")
                assert list(published.weights.offers) == (["gloo"] if channel == "gloo" else [])
                await sync(served, published.weights)
                exported = tmp_path / f"export-{number}"
                await actor.act("ExportModel", actor_pb2.ExportModelRequest, "x", directory=str(exported))
                expected = await fresh(exported, config, actor.others)
                for rollout in served:
                    assert await rollout.greedy() == expected
                assert expected != before, "the weights matter"
                before = expected
            said = process.errors.read_text()
    if channel == "gloo":
        assert said.count('"event": "weights sent"') == 2, "they came over the wire"
        assert "weights not sent" not in said
