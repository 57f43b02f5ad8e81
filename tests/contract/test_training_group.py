"""A role of two ranks, as processes: one gRPC face, the results of one process, one failure unit."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.actor.backends.torch import TorchActor
from services.critic.backends.torch import TorchCritic
from services.reference.backends.torch import TorchReference
from shared.batch import refs
from shared.batch.block import Block
from shared.batch.reader import BatchReader
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
    role_pb2_grpc,
)
from shared.rpc.client import call
from shared.rpc.errors import BatchLost, FailedPrecondition, GroupEnds, InvalidArgument, Unavailable
from shared.weights.grpc import GrpcFetcher, GrpcPublisher
from tests.fakes.role import TOKEN, RunningRole, fake_role
from tests.fakes.tiny import write_tiny_llama
from tests.fakes.training import join, make_config, replaced, roll_out, score

pytestmark = pytest.mark.timeout(240)
RUN = "r"
STARTED = 100.0
PPO = ("actor.mini_batch_size=4", "actor.epochs=2", "algorithm.kl.placement=reward", "algorithm.kl.target=0.1",
       "actor.optimizer.eps=1e-4", "critic.mini_batch_size=4", "critic.optimizer.eps=1e-4")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("untied-llama"), tied=False)


@dataclass(frozen=True)
class GroupProcess:
    """Rank 0 of a role that has two ranks."""

    process: "subprocess.Popen[bytes]"
    endpoint: str
    errors: Path

    @property
    def ranks(self) -> list[psutil.Process]:
        """The other ranks."""
        return psutil.Process(self.process.pid).children()


@contextlib.contextmanager
def group(
    role: str,
    directory: Path,
    *flags: str,
    ranks: int = 2,
    environ: Mapping[str, str] | None = None,
    around: Sequence[str] = (),
) -> Iterator[GroupProcess]:
    """With what starts the ranks `around` it, or it starts them itself."""
    errors = directory / f"{role}.log"
    environment = {"SEXTET_TOKEN": TOKEN, "SEXTET_REDIS_URL": "memory://", "OMP_NUM_THREADS": "1", **(environ or {})}
    command = [sys.executable, *around, "-m", f"services.{role}", "--threads", "1", "--metrics-port", "-1"]
    command += ["--data-dir", str(directory), *flags]
    command += ["--world-size", str(ranks)] if ranks > 1 and not around else []
    with errors.open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stderr=log)
    others: list[psutil.Process] = []
    try:
        endpoint, until = "", time.monotonic() + STARTED
        while not endpoint:
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < until, errors.read_text()
            time.sleep(0.1)
            lines = [line for line in errors.read_text().splitlines() if '"serving"' in line]
            endpoint = lines[0].partition('"endpoint": "')[2].partition('"')[0] if lines else ""
        others = psutil.Process(process.pid).children()
        yield GroupProcess(process, endpoint, errors)
    finally:
        process.kill()
        process.wait(30)
        assert not psutil.wait_procs(others, timeout=30)[1], "ranks outlived the first one"


@contextlib.asynccontextmanager
async def serving(
    role: str, directory: Path, *flags: str, environ: Mapping[str, str] | None = None, around: Sequence[str] = ()
) -> AsyncIterator[tuple[GroupProcess, "Client"]]:
    with group(role, directory, *flags, environ=environ, around=around) as started:
        async with fake_role() as others:
            yield started, Client(started.endpoint, others)


class Client:
    """What a controller does, and the store of the processes whose rows the role reads."""

    def __init__(self, endpoint: str, others: RunningRole) -> None:
        self.others, self.channel, self._count = others, others.connections.channel(endpoint), 0
        self.reader = BatchReader(others.connections)

    def operation(self, name: str, step: int = 1) -> common_pb2.Operation:
        self._count += 1
        named = common_pb2.OperationId(run=RUN, step=step, name=name, part=str(self._count))
        return common_pb2.Operation(id=named, epoch=1)

    def put(self, block: Block) -> batch_pb2.BatchRef:
        lengths = block["prompt_ids"].lengths + block["response_ids"].lengths if "prompt_ids" in block else None
        tokens = [1] * len(block) if lengths is None else lengths
        return batch_pb2.BatchRef(blocks=[self.others.context.store.put(block, run=RUN, step=1, tokens=tokens)])

    async def configure(self, config: RunConfig, checkpoint: Path | None = None) -> role_pb2.ConfigureResponse:
        request = role_pb2.ConfigureRequest(
            operation=self.operation("configure", 0), config_json=dump_config(config), checkpoint=str(checkpoint or "")
        )
        return await call(role_pb2_grpc.RoleServiceStub(self.channel).Configure, request, timeout=60)

    async def save(self, directory: Path) -> role_pb2.SaveCheckpointResponse:
        stub = role_pb2_grpc.RoleServiceStub(self.channel)
        stage = role_pb2.StageCheckpointRequest(operation=self.operation("stage"))
        staged = await call(stub.StageCheckpoint, stage, timeout=60)
        request = role_pb2.SaveCheckpointRequest(
            operation=self.operation("checkpoint"), directory=str(directory), version=staged.version
        )
        return await call(stub.SaveCheckpoint, request, timeout=60)

    async def act(self, method: str, kind: Any, name: str, **fields: Any) -> Any:
        stub = actor_pb2_grpc.ActorServiceStub(self.channel)
        return await call(getattr(stub, method), kind(operation=self.operation(name), **fields), timeout=60)

    async def read(self, ref: Any) -> Block:
        return await self.reader.read(refs.merge(ref), timeout=20)


def scored(samples: Block) -> Block:
    return score(samples, lambda ids: float((ids == 9).mean()))


def weights(actor: TorchActor) -> dict[str, torch.Tensor]:
    return dict(actor._training.of(RUN).engine.model.lm.named_parameters())


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name, tensor in b.items():
        torch.testing.assert_close(a[name], tensor.detach(), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_two_ranks_train_as_one_process_and_end_as_one(
    model: Path, untied: Path, tmp_path: Path, stages: int
) -> None:
    model = model if stages == 1 else untied
    alone = make_config(model, *PPO, "actor.micro_batch_size=2")
    config = make_config(model, *PPO, "actor.micro_batch_size=2", f"actor.parallel.pp={stages}")
    one = TorchActor(GrpcPublisher(), lambda: None)
    await one.configure(alone, RUN, None)
    samples = roll_out(model, prompts=5)
    reference = replaced(samples, "ref_logprobs", [row - 0.1 for row in samples["rollout_logprobs"].rows()])
    reference = reference.select(columns=["ref_logprobs"])
    values = replaced(samples, "values", [row * 0 for row in samples["rollout_logprobs"].rows()])
    values = values.select(columns=["values"])
    old, _ = await one.logprobs(RUN, samples)
    batch, _ = await one.advantages(RUN, join(samples, scored(samples), old, reference, values))
    version, metrics = await one.update(RUN, 1, batch)

    async with serving("actor", tmp_path) as (started, client):
        configured = await client.configure(config)
        assert configured.facts["ranks"] == (
            "1 copies x 2 shards x tp 1" if stages == 1 else "2 stages x 1 copies x 1 shards x tp 1"
        )
        assert configured.facts["parameters"] == str(sum(p.numel() for p in weights(one).values()))
        lost = client.put(samples)
        lost.blocks[0].block = "gone"
        with pytest.raises(BatchLost, match="rank 0"):
            await client.act("ComputeLogprobs", actor_pb2.ActorServiceComputeLogprobsRequest, "lost", inputs=lost)

        inputs = client.put(samples)
        kind = actor_pb2.ActorServiceComputeLogprobsRequest
        scores = await client.act("ComputeLogprobs", kind, "actor.logprobs", inputs=inputs)
        got = await client.read(scores.block)
        assert got.rows == old.rows
        np.testing.assert_allclose(got["old_logprobs"].data, old["old_logprobs"].data, atol=1e-5)
        joined = refs.merge(inputs, *map(client.put, (scored(samples), reference, values)), scores.block)
        kind = actor_pb2.ComputeAdvantagesRequest
        advantages = await client.act("ComputeAdvantages", kind, "actor.advantages", inputs=joined)
        inputs = refs.merge(advantages.block)
        poisoned = replaced(batch, "advantages", [row * np.nan for row in batch["advantages"].rows()])
        kind = actor_pb2.ActorServiceUpdateRequest
        with pytest.raises(FailedPrecondition, match="the loss is nan at optimizer step 1"):
            await client.act("Update", kind, "actor.update", inputs=client.put(poisoned))
        updated = await client.act("Update", kind, "actor.update", inputs=inputs)
        assert updated.version == version
        for name in ("loss", "grad_norm", "entropy", "clip_fraction", "ratio_max", "kl_coef", "tokens"):
            assert updated.metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name

        published = await client.act("PublishWeights", actor_pb2.PublishWeightsRequest, "actor.publish_weights")
        fetched = await GrpcFetcher(client.others.connections).fetch(published.weights, 30)
        assert_close(fetched, weights(one))
        kind = actor_pb2.ExportModelRequest
        await client.act("ExportModel", kind, "actor.export", directory=str(tmp_path / "model"))
        assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(), weights(one))

        saved = await client.save(tmp_path / "checkpoint")
        files = sorted(
            str(path.relative_to(tmp_path / "checkpoint")) for path in (tmp_path / "checkpoint").rglob("*.*")
        )
        assert "rank-1/model.safetensors" in files
        assert saved.version == version
        assert (await client.configure(config, tmp_path / "checkpoint")).version == version
        await one.configure(alone, RUN, str(tmp_path / "checkpoint"))
        assert one.version() == version
        again = await client.act("Update", actor_pb2.ActorServiceUpdateRequest, "again", inputs=client.put(batch))
        _, metrics = await one.update(RUN, 1, batch)
        assert again.metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-4)

        began = time.monotonic()
        started.ranks[0].send_signal(signal.SIGKILL)
        # Half a group must not answer that a command failed: who asks would ask again, and again, before it has ended.
        with pytest.raises(Unavailable):
            await client.act("Update", actor_pb2.ActorServiceUpdateRequest, "late", inputs=client.put(batch))
        assert started.process.wait(60) == 5
        assert time.monotonic() - began < 45, "long before the 60 s that a silent rank is given"
        assert "rank 0: the group ends: " in started.errors.read_text()


SHORT_OF_MEMORY = """
import os

if os.environ.get("RANK", "0") == "{rank}":
    import torch

    def backward(*_, **__):
        raise torch.OutOfMemoryError("none left\\nmore")

    torch.Tensor.backward = backward
"""
"""What Python imports before anything else, in a group of which one rank has too little memory for an update."""


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
async def test_what_a_rank_says_that_alone_runs_out_of_memory_is_the_answer(
    model: Path, tmp_path: Path, rank: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHORT_OF_MEMORY.format(rank=rank))
    samples = roll_out(model, prompts=5)
    values = replaced(samples, "returns", [np.arange(len(row)) for row in samples["response_ids"].rows()])
    batch = replaced(values, "values", [row * 0 for row in samples["rollout_logprobs"].rows()])
    async with serving("critic", tmp_path, environ={"PYTHONPATH": str(tmp_path)}) as (started, client):
        await client.configure(make_config(model, "critic.micro_batch_size=2"))
        stub = critic_pb2_grpc.CriticServiceStub(client.channel)
        request = critic_pb2.CriticServiceUpdateRequest(operation=client.operation("u"), inputs=client.put(batch))
        advice = r"lower micro_batch_size to 1 \(or set micro_batch_tokens to \d+\): .* none left"
        with pytest.raises(GroupEnds, match=rf"^rank {rank} failed: FailedPrecondition: out of memory: {advice}; "):
            await call(stub.Update, request, timeout=60)
        # Half a group must not look alive to whoever has heard that it ends.
        with pytest.raises(Unavailable):
            await call(role_pb2_grpc.RoleServiceStub(client.channel).Describe, role_pb2.DescribeRequest(), timeout=20)
        with pytest.raises(Unavailable):
            await call(stub.Update, request, timeout=60)
        assert started.process.wait(60) == 5
        assert f"rank 0: the group ends: rank {rank} failed: " in started.errors.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("critic", "reference", "ranks"), [
    ("tp", "cp", "1 copies x 1 shards x cp 2 x tp 1"), ("pp", "pp", "2 stages x 1 copies x 1 shards x tp 1"),
])  # fmt: skip
async def test_critic_and_reference_of_two_ranks(
    model: Path, untied: Path, tmp_path: Path, critic: str, reference: str, ranks: str
) -> None:
    model = untied if reference == "pp" else model
    config = make_config(model, *PPO, f"critic.parallel.{critic}=2")
    one, samples = TorchCritic(lambda: None), roll_out(model, prompts=5)
    await one.configure(make_config(model, *PPO), RUN, None)
    values, _ = await one.values(RUN, samples)
    batch = replaced(join(samples, values), "returns", [np.arange(len(row)) for row in samples["response_ids"].rows()])
    _, metrics = await one.update(RUN, 1, batch)
    after, _ = await one.values(RUN, samples)
    async with serving("critic", tmp_path) as (_, client):
        stub = critic_pb2_grpc.CriticServiceStub(client.channel)
        with pytest.raises(InvalidArgument, match=r"critic\.parallel: dp 2 x tp 2 = 4 ranks, but this service has 2"):
            await client.configure(make_config(model, "critic.parallel={dp: 2, tp: 2}"))
        await client.configure(config)
        request = critic_pb2.CriticServiceUpdateRequest(operation=client.operation("u"), inputs=client.put(batch))
        updated = await call(stub.Update, request, timeout=60)
        for name in ("loss", "grad_norm", "explained_variance"):
            assert updated.metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
        values_request = critic_pb2.ComputeValuesRequest(operation=client.operation("v"), inputs=client.put(samples))
        got = await client.read((await call(stub.ComputeValues, values_request, timeout=60)).block)
        np.testing.assert_allclose(got["values"].data, after["values"].data, atol=1e-5)
    frozen = TorchReference()
    await frozen.configure(make_config(model, *PPO), RUN, None)
    wanted, _ = await frozen.logprobs(RUN, samples)
    tokens = "actor.micro_batch_tokens=" + ("auto" if reference == "cp" else "64")
    shared = make_config(model, *PPO, f"reference_parallel.{reference}=2", tokens)
    async with serving("reference", tmp_path) as (_, client):
        facts = (await client.configure(shared)).facts
        assert facts["ranks"] == ranks
        assert reference == "pp" or facts["micro_batch_tokens"].startswith("auto: ")
        scorer = reference_pb2_grpc.ReferenceServiceStub(client.channel)
        scoring = reference_pb2.ReferenceServiceComputeLogprobsRequest(
            operation=client.operation("l"), inputs=client.put(samples)
        )
        got = await client.read((await call(scorer.ComputeLogprobs, scoring, timeout=60)).block)
        np.testing.assert_allclose(got["ref_logprobs"].data, wanted["ref_logprobs"].data, atol=1e-5)


@pytest.mark.slow
async def test_torchrun_around_a_role_starts_its_ranks_and_ends_with_them(model: Path, tmp_path: Path) -> None:
    """As on several machines: the ranks find each other by what torchrun tells them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    around = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    around += ["--master-port", str(port)]
    samples, frozen = roll_out(model, prompts=5), TorchReference()
    await frozen.configure(make_config(model), RUN, None)
    wanted, _ = await frozen.logprobs(RUN, samples)
    async with serving("reference", tmp_path, around=around) as (started, client):
        assert (await client.configure(make_config(model))).facts["ranks"] == "1 copies x 2 shards x tp 1"
        request = reference_pb2.ReferenceServiceComputeLogprobsRequest(
            operation=client.operation("l"), inputs=client.put(samples)
        )
        scorer = reference_pb2_grpc.ReferenceServiceStub(client.channel)
        got = await client.read((await call(scorer.ComputeLogprobs, request, timeout=60)).block)
        np.testing.assert_allclose(got["ref_logprobs"].data, wanted["ref_logprobs"].data, atol=1e-5)
        assert len(started.ranks) == 2, "it has started none itself"
        started.ranks[1].kill()
        assert started.process.wait(60) != 0


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_rank_ends_the_group(tmp_path: Path, rank: int) -> None:
    with group("critic", tmp_path, "--rank-timeout", "5") as started:
        (other,) = started.ranks
        began = time.monotonic()
        if rank == 1:
            other.suspend()
            assert started.process.wait(60) == 5
            assert "rank 1 of 2 has given no sign of life for 5 s" in started.errors.read_text()
        else:
            os.kill(started.process.pid, signal.SIGSTOP)
            # Its parent, which is frozen, can't bury it.
            while other.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() - began < 60
                time.sleep(0.1)
            assert "rank 0 of 2 has not answered for 5 s" in started.errors.read_text()
            os.kill(started.process.pid, signal.SIGCONT)
            assert started.process.wait(60) == 5
        assert not psutil.wait_procs([other], timeout=30)[1]


@pytest.mark.slow
@pytest.mark.chaos
def test_ranks_end_with_the_first(tmp_path: Path) -> None:
    with group("critic", tmp_path) as started:
        (other,) = started.ranks
        other.suspend()
        started.process.kill()
        assert not psutil.wait_procs([other], timeout=30)[1]
    with group("critic", tmp_path) as started:
        (other,) = started.ranks
        started.process.terminate()
        assert started.process.wait(60) == 0
        assert not psutil.wait_procs([other], timeout=30)[1]
