"""Two ranks of an actor, recorded on demand: a trace of each, and the same weights to the bit."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shared.batch import refs
from shared.gen.sextet.v1 import actor_pb2, common_pb2
from tests.contract.test_training_group import PPO, Client, scored, serving
from tests.fakes.tiny import write_tiny_llama
from tests.fakes.training import join, make_config, replaced, roll_out

pytestmark = pytest.mark.timeout(240)
UPDATE = actor_pb2.ActorServiceUpdateRequest


async def weights(client: Client, directory: Path) -> dict[str, Any]:
    await client.act("ExportModel", actor_pb2.ExportModelRequest, "actor.export", directory=str(directory))
    return load_file(directory / "model.safetensors")


def trace(path: str) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        return json.load(file)


async def test_two_ranks_are_recorded_and_compute_the_same(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    config, samples = make_config(model, *PPO), roll_out(model, prompts=5)
    ones = replaced(samples, "ref_logprobs", [row - 0.1 for row in samples["rollout_logprobs"].rows()])
    values = replaced(samples, "values", [row * 0 for row in samples["rollout_logprobs"].rows()])
    others = ones.select(columns=["ref_logprobs"]), values.select(columns=["values"])
    prefix = tmp_path / "traces" / "step-1-actor.update"
    async with serving("actor", tmp_path) as (_, client):
        await client.configure(config)
        rows = client.put(samples)
        kind = actor_pb2.ActorServiceComputeLogprobsRequest
        profile = common_pb2.Profiling(prefix=str(tmp_path / "traces" / "step-1-actor.logprobs"))
        old = await client.act("ComputeLogprobs", kind, "actor.logprobs", inputs=rows, profile=profile)
        assert [(rank.rank, rank.fault) for rank in old.profile] == [(0, ""), (1, "")]
        inputs = client.put(join(samples, scored(samples), await client.read(old.block), *others))
        kind = actor_pb2.ComputeAdvantagesRequest
        batch = await client.act("ComputeAdvantages", kind, "actor.advantages", inputs=inputs)
        inputs = refs.merge(batch.block)

        plain = await client.act("Update", UPDATE, "actor.update", inputs=inputs)
        assert not plain.profile
        assert 0 < plain.metrics["rank_seconds_min"] <= plain.metrics["rank_seconds_max"]
        expected = await weights(client, tmp_path / "plain")
        await client.configure(config)
        profile = common_pb2.Profiling(prefix=str(prefix))
        recorded = await client.act("Update", UPDATE, "actor.update", inputs=inputs, profile=profile)
        got = await weights(client, tmp_path / "recorded")
        assert got.keys() == expected.keys()
        assert all(bool((got[name] == expected[name]).all()) for name in expected)
        steady = ("loss", "grad_norm", "entropy", "ratio_max", "kl_coef", "optimizer_steps")
        assert {name: recorded.metrics[name] for name in steady} == {name: plain.metrics[name] for name in steady}

        # Where it can't be written the answer says so, by rank, and the update is done.
        (tmp_path / "file").write_text("")
        profile = common_pb2.Profiling(prefix=str(tmp_path / "file" / "t"))
        unwritten = await client.act("Update", UPDATE, "actor.update", inputs=inputs, profile=profile)
        assert unwritten.version > recorded.version
        assert all(str(tmp_path / "file") in rank.fault and not rank.path for rank in unwritten.profile)

    assert [rank.path for rank in recorded.profile] == [f"{prefix}-rank-{rank}.json.gz" for rank in (0, 1)]
    for rank in recorded.profile:
        assert rank.fault == ""
        assert 0 < rank.communication_share < 1
        assert 0 < rank.compute_share < 1
        assert rank.seconds > 0
        assert rank.memory_peak_gib > 0
        assert any(top.name.startswith("gloo:") for top in rank.top)
        content = trace(rank.path)
        names = {event["name"] for event in content["traceEvents"]}
        assert {"aten::mm", "gloo:all_gather", "c10d::_allgather_base_"} <= names
        assert content["distributedInfo"]["rank"] == rank.rank
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        f"step-1-actor.{call}-rank-{rank}.json.gz" for call in ("logprobs", "update") for rank in (0, 1)
    }
