"""Actor, critic and reference over real gRPC: one PPO step by reference, and what they refuse."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.actor import __main__ as actor_main
from services.actor.settings import ActorSettings
from services.critic import __main__ as critic_main
from services.critic.settings import CriticSettings
from services.reference import __main__ as reference_main
from services.reference.settings import ReferenceSettings
from shared.batch import refs
from shared.batch.block import Block
from shared.config import RunConfig, dump_config
from shared.gen.sextet.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    batch_pb2,
    common_pb2,
    critic_pb2,
    critic_pb2_grpc,
    reference_pb2,
    reference_pb2_grpc,
    role_pb2,
)
from shared.rpc.client import call
from shared.rpc.errors import (
    BatchLost,
    FailedPrecondition,
    InvalidArgument,
    NotFinite,
    PayloadMismatch,
    StaleEpoch,
    Unimplemented,
    VersionGap,
)
from shared.weights.digest import state_digest
from shared.weights.grpc import GrpcFetcher
from tests.fakes.role import RunningRole, fake_role
from tests.fakes.tiny import write_tiny_llama
from tests.fakes.training import make_config, replaced, roll_out, score

RUN = "r"
ROLES: dict[str, tuple[Any, Any]] = {
    "actor": (actor_main.build, ActorSettings),
    "critic": (critic_main.build, CriticSettings),
    "reference": (reference_main.build, ReferenceSettings),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def operation(name: str, step: int = 1, *, epoch: int = 1, part: str = "", run: str = RUN) -> common_pb2.Operation:
    return common_pb2.Operation(id=common_pb2.OperationId(run=run, step=step, name=name, part=part), epoch=epoch)


async def save(role: RunningRole, directory: Path) -> role_pb2.SaveCheckpointResponse:
    stage = role_pb2.StageCheckpointRequest(operation=operation("stage", 1))
    version = (await call(role.role.StageCheckpoint, stage, timeout=60)).version
    save = role_pb2.SaveCheckpointRequest(
        operation=operation("checkpoint", 1), directory=str(directory), version=version
    )
    return await call(role.role.SaveCheckpoint, save, timeout=60)


@dataclass(frozen=True)
class Roles:
    """The three roles, and a fourth process's store that holds what rollout and reward would."""

    actor: RunningRole
    critic: RunningRole
    reference: RunningRole
    others: RunningRole

    async def configure(self, config: RunConfig, **changes: Any) -> list[role_pb2.ConfigureResponse]:
        request = role_pb2.ConfigureRequest(
            operation=operation("configure", 0, **changes), config_json=dump_config(config)
        )
        roles = (self.actor, self.critic, self.reference)
        return [await call(role.role.Configure, request, timeout=60) for role in roles]

    def put(self, block: Block, step: int = 1) -> batch_pb2.BatchRef:
        lengths = (
            block["prompt_ids"].lengths + block["response_ids"].lengths if "prompt_ids" in block else [1] * len(block)
        )
        return batch_pb2.BatchRef(blocks=[self.others.context.store.put(block, run=RUN, step=step, tokens=lengths)])

    def act(self, method: str) -> Any:
        return getattr(actor_pb2_grpc.ActorServiceStub(self.actor.channel), method)

    def criticise(self, method: str) -> Any:
        return getattr(critic_pb2_grpc.CriticServiceStub(self.critic.channel), method)

    async def step(self, number: int, samples: Block, part: str = "") -> tuple[Any, Any, Any]:
        """Everything of a PPO step that these roles do; advantages, critic's and actor's update."""
        inputs = self.put(samples, number)
        scores = self.put(score(samples, lambda ids: float((ids == 9).mean())), number)
        old = await call(
            self.act("ComputeLogprobs"),
            actor_pb2.ActorServiceComputeLogprobsRequest(operation=operation("actor.logprobs", number), inputs=inputs),
            timeout=60,
        )
        reference = await call(
            reference_pb2_grpc.ReferenceServiceStub(self.reference.channel).ComputeLogprobs,
            reference_pb2.ReferenceServiceComputeLogprobsRequest(
                operation=operation("reference.logprobs", number), inputs=inputs
            ),
            timeout=60,
        )
        values = await call(
            self.criticise("ComputeValues"),
            critic_pb2.ComputeValuesRequest(operation=operation("critic.values", number), inputs=inputs),
            timeout=60,
        )
        joined = refs.merge(inputs, scores, old.block, reference.block, values.block)
        request = actor_pb2.ComputeAdvantagesRequest(operation=operation("actor.advantages", number), inputs=joined)
        advantages = await call(self.act("ComputeAdvantages"), request, timeout=60)
        batch = refs.merge(advantages.block)
        critic = await call(
            self.criticise("Update"),
            critic_pb2.CriticServiceUpdateRequest(operation=operation("critic.update", number), inputs=batch),
            timeout=60,
        )
        actor = await call(
            self.act("Update"),
            actor_pb2.ActorServiceUpdateRequest(operation=operation("actor.update", number), inputs=batch),
            timeout=60,
        )
        return advantages, critic, actor


@contextlib.asynccontextmanager
async def serve() -> AsyncIterator[Roles]:
    async with contextlib.AsyncExitStack() as stack:
        running = {
            name: await stack.enter_async_context(fake_role(build, settings, threads=1))
            for name, (build, settings) in ROLES.items()
        }
        yield Roles(**running, others=await stack.enter_async_context(fake_role()))


PPO = ("algorithm.kl.placement=reward", "actor.mini_batch_size=4", "actor.epochs=2", "critic.mini_batch_size=4")


async def test_ppo_steps_by_reference(model: Path, tmp_path: Path) -> None:
    async with serve() as roles:
        configured = await roles.configure(make_config(model, *PPO))
        assert [each.version for each in configured] == [0, 0, 0]
        assert configured[0].facts["device"] == "cpu"
        samples = roll_out(model, prompts=4)
        advantages, critic, actor = await roles.step(1, samples)
        assert set(advantages.metrics) >= {"score_mean", "kl", "advantage_std", "rollout_logprob_abs_difference_max"}
        assert advantages.metrics["kl"] == pytest.approx(0, abs=1e-5), "the reference is the actor before it learned"
        assert advantages.metrics["rollout_logprob_abs_difference_max"] < 1e-5
        assert {column.name for column in advantages.block.columns} >= {
            "advantages",
            "returns",
            "values",
            "old_logprobs",
        }
        tokens = dict(zip(samples.rows, samples["prompt_ids"].lengths + samples["response_ids"].lengths, strict=True))
        assert list(advantages.block.tokens) == [tokens[key] for key in refs.row_keys(advantages.block)]
        assert (critic.version, actor.version) == (2, 4)
        assert {"loss", "clip_fraction", "approx_kl", "entropy", "grad_norm", "lr", "ratio_max"} <= set(actor.metrics)
        assert {"loss", "clip_fraction", "explained_variance", "grad_norm", "lr"} <= set(critic.metrics)
        _, _, actor = await roles.step(2, roll_out(model, prompts=4, step=2))
        assert actor.version == 8
        described = await call(roles.actor.role.Describe, role_pb2.DescribeRequest(), timeout=5)
        assert (described.version, described.last_applied.name, described.last_applied.step) == (8, "actor.update", 2)

        publish = actor_pb2.PublishWeightsRequest(operation=operation("actor.publish_weights", 2))
        weights = (await call(roles.act("PublishWeights"), publish, timeout=60)).weights
        fetched = await GrpcFetcher(roles.others.connections).fetch(weights, 30)
        assert weights.version == 8
        export = actor_pb2.ExportModelRequest(operation=operation("actor.export", 2), directory=str(tmp_path / "m"))
        await call(roles.act("ExportModel"), export, timeout=60)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
        assert state_digest(loaded.state_dict()) == weights.digest
        assert torch.equal(loaded.state_dict()["lm_head.weight"], fetched["lm_head.weight"])


async def test_a_repeated_operation_is_applied_once(model: Path) -> None:
    async with serve() as roles:
        await roles.configure(make_config(model))
        samples = roll_out(model)
        advantages, _, first = await roles.step(1, samples)
        request = actor_pb2.ActorServiceUpdateRequest(
            operation=operation("actor.update"), inputs=refs.merge(advantages.block)
        )
        assert await call(roles.act("Update"), request, timeout=60) == first
        other = actor_pb2.ActorServiceUpdateRequest(operation=operation("actor.update"), inputs=roles.put(samples))
        with pytest.raises(PayloadMismatch):
            await call(roles.act("Update"), other, timeout=60)
        await roles.configure(make_config(model, "seed=1"), epoch=2, part="again")
        with pytest.raises(StaleEpoch):
            await call(roles.act("Update"), request, timeout=60)


async def test_a_refused_update_may_be_tried_again(model: Path) -> None:
    """A first attempt with damaged advantages is refused; the operation's id stays free for the same payload only."""
    async with serve() as roles:
        await roles.configure(make_config(model))
        advantages, _, _ = await roles.step(1, roll_out(model))
        block = roles.actor.context.store.get(advantages.block.block)
        inputs = roles.put(replaced(block, "advantages", [np.full(n, np.nan) for n in block["advantages"].lengths]))
        request = actor_pb2.ActorServiceUpdateRequest(operation=operation("actor.update", 2), inputs=inputs)
        for _ in range(2):
            with pytest.raises(NotFinite, match="loss is nan at optimizer step 2"):
                await call(roles.act("Update"), request, timeout=60)
        described = await call(roles.actor.role.Describe, role_pb2.DescribeRequest(), timeout=5)
        assert (described.version, described.last_applied.step) == (1, 1)


async def test_checkpoints_bring_both_back(model: Path, tmp_path: Path) -> None:
    config = make_config(model, *PPO)

    async def finish(roles: Roles) -> str:
        await roles.step(2, roll_out(model, prompts=4, step=2))
        publish = actor_pb2.PublishWeightsRequest(operation=operation("actor.publish_weights", 2))
        return (await call(roles.act("PublishWeights"), publish, timeout=60)).weights.digest

    async with serve() as roles:
        await roles.configure(config)
        await roles.step(1, roll_out(model, prompts=4))
        assert (await save(roles.actor, tmp_path / "actor")).version == 4
        assert (await save(roles.critic, tmp_path / "critic")).version == 2
        with pytest.raises(Unimplemented):
            await save(roles.reference, tmp_path / "reference")
        straight = await finish(roles)
    async with serve() as roles:
        await roles.configure(config)
        for role, name, version in ((roles.actor, "actor", 4), (roles.critic, "critic", 2)):
            request = role_pb2.ConfigureRequest(
                operation=operation("configure", 0, part="resume"),
                config_json=dump_config(config),
                checkpoint=str(tmp_path / name),
            )
            assert (await call(role.role.Configure, request, timeout=60)).version == version
        assert await finish(roles) == straight


async def test_a_restarted_role_answers_for_the_last_change_in_its_checkpoint(model: Path, tmp_path: Path) -> None:
    config = make_config(model)
    async with serve() as roles:
        await roles.configure(config)
        advantages, _, answer = await roles.step(1, roll_out(model))
        await save(roles.actor, tmp_path / "a")
    update = actor_pb2.ActorServiceUpdateRequest(
        operation=operation("actor.update", epoch=2), inputs=refs.merge(advantages.block)
    )
    async with serve() as roles:
        configure = role_pb2.ConfigureRequest(
            operation=operation("configure", 0, epoch=2),
            config_json=dump_config(config),
            checkpoint=str(tmp_path / "a"),
        )
        await call(roles.actor.role.Configure, configure, timeout=60)
        # The block went with the process that held it: nothing is computed again.
        assert await call(roles.act("Update"), update, timeout=60) == answer
        update.inputs.blocks[0].block = "another"
        with pytest.raises(PayloadMismatch) as refused:
            await call(roles.act("Update"), update, timeout=60)
        assert (refused.value.details["applied_name"], refused.value.details["applied_step"]) == ("actor.update", "1")
        update.operation.epoch = 1
        with pytest.raises(StaleEpoch) as refused:
            await call(roles.act("Update"), update, timeout=60)
        assert (refused.value.details["highest"], refused.value.details["applied_step"]) == ("2", "1")
        described = await call(roles.actor.role.Describe, role_pb2.DescribeRequest(), timeout=5)
        assert (described.version, described.last_applied.name) == (answer.version, "actor.update")


async def test_an_update_for_another_version_is_refused_with_the_roles_own(model: Path) -> None:
    async with serve() as roles:
        await roles.configure(make_config(model))
        advantages, _, answer = await roles.step(1, roll_out(model))
        inputs = refs.merge(advantages.block)
        for call_, request in (
            (roles.act("Update"), actor_pb2.ActorServiceUpdateRequest(operation=operation("actor.update", 3))),
            (roles.criticise("Update"), critic_pb2.CriticServiceUpdateRequest(operation=operation("critic.update", 3))),
        ):
            request.inputs.CopyFrom(inputs)
            request.base_version = answer.version + 1
            with pytest.raises(VersionGap) as refused:
                await call(call_, request, timeout=60)
            assert refused.value.details["version"] == str(answer.version)
        described = await call(roles.actor.role.Describe, role_pb2.DescribeRequest(), timeout=5)
        assert described.version == answer.version


async def test_what_is_refused_says_why(model: Path) -> None:
    async with serve() as roles:
        inputs = roles.put(roll_out(model))
        request = actor_pb2.ActorServiceComputeLogprobsRequest(operation=operation("actor.logprobs"), inputs=inputs)
        with pytest.raises(FailedPrecondition, match="is not configured, not for run 'r'"):
            await call(roles.act("ComputeLogprobs"), request, timeout=60)
        with pytest.raises(FailedPrecondition, match=r"model\.path: there is no directory '/no/such'"):
            await roles.configure(make_config(Path("/no/such")))
        await roles.configure(make_config(model), part="2")
        advantages = actor_pb2.ComputeAdvantagesRequest(operation=operation("actor.advantages"), inputs=inputs)
        with pytest.raises(InvalidArgument, match="score"):
            await call(roles.act("ComputeAdvantages"), advantages, timeout=60)
        roles.others.context.store.release(RUN, None)
        with pytest.raises(BatchLost):
            await call(roles.act("ComputeLogprobs"), request, timeout=60)


async def test_released_runs_leave_nothing_behind(model: Path) -> None:
    async with serve() as roles:
        await roles.configure(make_config(model))
        await roles.step(1, roll_out(model))
        for role in (roles.actor, roles.critic, roles.reference):
            assert role.context.store.held_bytes > 0
            await call(role.role.ReleaseRun, role_pb2.ReleaseRunRequest(run=RUN, epoch=1), timeout=60)
            described = await call(role.role.Describe, role_pb2.DescribeRequest(), timeout=5)
            assert (described.version, described.held_bytes, described.run) == (-1, 0, "")
