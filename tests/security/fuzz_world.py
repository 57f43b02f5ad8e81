"""What the fuzzer needs of each service: a real one, configured for a run, and valid requests of every method."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.batch.block import Block, Ragged
from shared.batch.reader import BatchReader
from shared.config import dump_config
from shared.config_loading import load_config
from shared.gen.sextet.v1 import (
    actor_pb2,
    batch_pb2,
    common_pb2,
    controller_pb2,
    critic_pb2,
    reference_pb2,
    reward_pb2,
    role_pb2,
    rollout_pb2,
    weights_pb2,
)
from shared.rpc import run as rpc_run
from shared.rpc.client import call
from shared.rpc.role import SavedCheckpoint
from shared.weights.grpc import GrpcFetcher
from tests.fakes.training import roll_out
from tests.integration.conftest import make_home
from tests.security.methods import Method, sextet_methods
from tests.security.serving import real_controller, real_role

RUN = "r"
OF_ROLE = {
    "rollout": "RolloutService", "actor": "ActorService", "critic": "CriticService",
    "reference": "ReferenceService", "reward": "ScoringService",
}  # fmt: skip
WITH_WEIGHTS = ("rollout", "actor")


@dataclass(frozen=True)
class World:
    """A service under test.

    Attributes:
        seeds: valid requests by method path, the methods that end things last.
        refresh: makes it forget what was done, so that as much of a request is looked at as before.
        same_epoch: makes it forget that a controller of a later term spoke: it would refuse all others.
    """

    endpoint: str
    seeds: Mapping[str, Sequence[Any]]
    refresh: Callable[[], None] = lambda: None
    same_epoch: Callable[[], None] = lambda: None

    @property
    def methods(self) -> list[Method]:
        known = {method.path: method for method in sextet_methods()}
        return [known[path] for path in self.seeds]


@contextlib.asynccontextmanager
async def world(role: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """The service of a role; "controller" too. Paths that requests name are relative to `directory`."""
    home = make_home(directory)
    (directory / "inner").mkdir()
    monkeypatch.chdir(directory / "inner")
    config = load_config(
        home.config(model={"path": str(directory / "model")}, data={"path": str(directory / "data.jsonl")})
    )
    config_json = dump_config(config).replace('"reward.py:', f'"{directory}/reward.py:')
    if role == "controller":
        async with real_controller(directory) as entry:
            yield World(entry.endpoint, _controller_seeds(config_json))
        return
    # Nobody answers at the addresses that mutated requests name; waiting for that is tested elsewhere.
    monkeypatch.setattr(rpc_run, "BatchReader", lambda *args: BatchReader(*args, unreachable_after=0.02))
    monkeypatch.setattr(GrpcFetcher.__init__, "__kwdefaults__", {"max_bytes": 1 << 30, "unreachable_after": 0.02})
    extra = {"fetch_timeout": 0.05} if role == "rollout" else {"read_timeout": 1.0}
    async with real_role(role, directory / "state", **extra) as running:
        _keep_off_the_disk(running.parts.backend)
        seeds = await _role_seeds(role, running, config_json, directory)

        def refresh() -> None:
            operations = running.context.operations
            operations.restart(RUN)
            running.context.store.release(RUN, None)

        def same_epoch() -> None:
            running.context.operations.epoch = 1

        yield World(running.endpoint, seeds, refresh, same_epoch)


def _keep_off_the_disk(backend: Any) -> None:
    """A mutated directory is written nowhere: the controller names them, and is trusted to."""

    async def save(directory: Path) -> SavedCheckpoint:
        return SavedCheckpoint(str(directory)[:8], 0, backend.version())

    async def export(run: str, directory: Path) -> None:
        return None

    for name, fake in (("save", save), ("export", export)):
        if hasattr(backend, name):
            setattr(backend, name, fake)


async def _role_seeds(role: str, running: Any, config_json: str, directory: Path) -> dict[str, list[Any]]:
    configure = role_pb2.ConfigureRequest(operation=_operation("configure", 0, "first"), config_json=config_json)
    await call(running.role.Configure, configure, timeout=60)
    block = samples(directory / "model")
    ref = running.context.store.put(block, run="kept", step=1, tokens=[8] * len(block))
    inputs = batch_pb2.BatchRef(blocks=[ref])
    rows = [common_pb2.RowKey(uid=key.uid, sample=key.sample) for key in block.rows]
    service = f"/sextet.v1.{OF_ROLE[role]}/"
    weights = [
        weights_pb2.WeightsRef(
            run=RUN, version=1, endpoints=[running.endpoint], digest="0" * 32, bytes=1000, channel="grpc"
        )
    ]
    seeds: dict[str, list[Any]] = {
        "/sextet.v1.DataService/Read": [
            batch_pb2.ReadRequest(block=ref.block),
            batch_pb2.ReadRequest(block=ref.block, columns=["response_ids", "response"], rows=rows[:3]),
        ],
    }
    if role == "actor":
        published = actor_pb2.PublishWeightsRequest(operation=_operation("actor.publish_weights"))
        answer = await _call(running, f"{service}PublishWeights", published, actor_pb2.PublishWeightsResponse)
        weights = [answer.weights]
        work = {
            "ComputeLogprobs": actor_pb2.ActorServiceComputeLogprobsRequest, "HoldRows": actor_pb2.HoldRowsRequest,
            "ComputeAdvantages": actor_pb2.ComputeAdvantagesRequest, "Update": actor_pb2.ActorServiceUpdateRequest,
        }  # fmt: skip
        seeds |= {
            f"{service}{n}": [kind(operation=_operation(f"actor.{n}"), inputs=inputs)] for n, kind in work.items()
        }
        seeds[f"{service}PublishWeights"] = [published]
        seeds[f"{service}ExportModel"] = [
            actor_pb2.ExportModelRequest(operation=_operation("actor.export"), directory="out")
        ]
    elif role == "critic":
        kinds = {"ComputeValues": critic_pb2.ComputeValuesRequest, "Update": critic_pb2.CriticServiceUpdateRequest}
        seeds |= {
            f"{service}{n}": [kind(operation=_operation(f"critic.{n}"), inputs=inputs)] for n, kind in kinds.items()
        }
    elif role == "reference":
        kind = reference_pb2.ReferenceServiceComputeLogprobsRequest
        seeds[f"{service}ComputeLogprobs"] = [kind(operation=_operation("reference.logprobs"), inputs=inputs)]
    elif role == "reward":
        kind = reward_pb2.ScoreBatchRequest
        seeds[f"{service}ScoreBatch"] = [kind(operation=_operation("reward.score"), inputs=inputs)]
    else:
        prompts = [rollout_pb2.PromptRow(uid=f"1:{i}:0", index=i, samples=[0, 1]) for i in range(2)]
        operation = _operation("rollout.generate")
        seeds[f"{service}Generate"] = [
            rollout_pb2.GenerateRequest(operation=operation, prompts=prompts),
            rollout_pb2.GenerateRequest(operation=operation, prompts=prompts, greedy=True, budget=2),
        ]
        seeds[f"{service}PrepareWeights"] = [
            rollout_pb2.PrepareWeightsRequest(operation=_operation("rollout.prepare_weights"), weights=weights[0])
        ]
        seeds[f"{service}CommitWeights"] = [
            rollout_pb2.CommitWeightsRequest(operation=_operation("rollout.commit_weights"), version=0, digest="0" * 32)
        ]
    if role in WITH_WEIGHTS:
        seeds["/sextet.v1.WeightsService/Fetch"] = [
            weights_pb2.FetchRequest(run=RUN, version=weights[0].version), weights_pb2.FetchRequest(run=RUN, version=9)
        ]  # fmt: skip
        seeds["/sextet.v1.WeightsService/Join"] = [
            weights_pb2.JoinRequest(run=RUN, version=weights[0].version, member="m")
        ]
    return {**seeds, **_common_seeds(config_json)}


def _common_seeds(config_json: str) -> dict[str, list[Any]]:
    service = "/sextet.v1.RoleService/"
    return {
        f"{service}Describe": [role_pb2.DescribeRequest()],
        f"{service}StageCheckpoint": [role_pb2.StageCheckpointRequest(operation=_operation("stage"))],
        f"{service}SaveCheckpoint": [
            role_pb2.SaveCheckpointRequest(operation=_operation("checkpoint"), directory="checkpoint")
        ],
        f"{service}ReleaseStep": [role_pb2.ReleaseStepRequest(run="other", epoch=1, step=1)],
        f"{service}Configure": [
            role_pb2.ConfigureRequest(operation=_operation("configure", 0), config_json=config_json)
        ],
        f"{service}ReleaseRun": [role_pb2.ReleaseRunRequest(run="other", epoch=1)],
    }


def _controller_seeds(config_json: str) -> dict[str, list[Any]]:
    pb, service = controller_pb2, "/sextet.v1.ControllerService/"
    # Without defaults, so that most changes are to what matters.
    short = json.dumps({key: value for key, value in json.loads(config_json).items() if key in SHORT})
    return {
        f"{service}GetRun": [pb.GetRunRequest(id="r")],
        f"{service}ListRuns": [pb.ListRunsRequest()],
        f"{service}WatchRun": [pb.WatchRunRequest(id="r"), pb.WatchRunRequest(id="r", after="1-0")],
        f"{service}ListServices": [pb.ListServicesRequest()],
        f"{service}Scale": [pb.ScaleRequest(role="reward", replicas=2)],
        f"{service}CheckpointRun": [pb.CheckpointRunRequest(id="r")],
        f"{service}ProfileRun": [pb.ProfileRunRequest(id="r", role="actor", steps=1)],
        f"{service}PauseRun": [pb.PauseRunRequest(id="r")],
        f"{service}ResumeRun": [pb.ResumeRunRequest(id="r")],
        f"{service}CancelRun": [pb.CancelRunRequest(id="r")],
        # Last: every run that it makes is in every list from then on.
        f"{service}CreateRun": [
            pb.CreateRunRequest(config_json=config_json, id="r"),
            pb.CreateRunRequest(config_json=short),
        ],
    }


SHORT = ("model", "data", "reward", "total_steps", "rollout")


def samples(model: Path) -> Block:
    """Six rows with every column that a role reads."""
    block = roll_out(model)
    lengths, rng = block["response_ids"].lengths, np.random.default_rng(0)
    floats = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "entropy", "sum_pi_squared")
    columns = {name: Ragged.from_rows([rng.standard_normal(n) for n in lengths], "float32") for name in floats}
    columns |= {"score": Ragged.from_scalars([0.5] * len(block), "float32")}
    columns |= {"valid": Ragged.from_scalars([1] * len(block), "uint8")}
    texts = {"prompt_json": '"q"', "response": "a", "data_source": "d", "ground_truth": "a", "extra_info": "{}"}
    columns |= {name: Ragged.from_text([text] * len(block)) for name, text in texts.items()}
    return Block(block.rows, {**block.columns, **columns})


def _operation(name: str, step: int = 1, part: str = "") -> common_pb2.Operation:
    return common_pb2.Operation(id=common_pb2.OperationId(run=RUN, step=step, name=name, part=part), epoch=1)


async def _call(running: Any, path: str, request: Any, answer: Any) -> Any:
    method = running.channel.unary_unary(path, type(request).SerializeToString, answer.FromString)
    return await call(method, request, timeout=30)
