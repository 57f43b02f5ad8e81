"""The controller and the five real roles as processes: a PPO run on a tiny model, disturbed and not, ends with the same
weights, bit for bit."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.rpc.client import call, stream
from shared.state import StateStore, embedded
from shared.state.registry import list_replicas
from tests.fakes.tiny import write_tiny_llama
from tests.integration.test_controller_process import Process, redis, store

__all__ = ["redis", "store"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return solution_str.count('a') / 8\n"
)
SECONDS = 240


@contextlib.asynccontextmanager
async def started(
    store: StateStore, redis: embedded.EmbeddedRedis, tmp_path: Path, replicas: dict[str, int]
) -> AsyncIterator[Process]:
    process = Process(store, redis.url, tmp_path)
    await process.start("--scaler", "process", "--log-dir", str(tmp_path / "logs"), OMP_NUM_THREADS="1")
    stub = await process.stub()
    for role, count in replicas.items():
        await call(stub.Scale, pb.ScaleRequest(role=role, replicas=count, at_once=True), timeout=30)
    async with asyncio.timeout(SECONDS):
        while len(await list_replicas(store)) < 1 + sum(replicas.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    yield process
    process.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.process.wait(), 60) == 0
    await process.close()


@pytest_asyncio.fixture
async def sextet(store: StateStore, redis: embedded.EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Process]:
    replicas = {"actor": 1, "critic": 1, "rollout": 2, "reward": 1, "reference": 1}
    async with started(store, redis, tmp_path, replicas) as process:
        yield process


@pytest_asyncio.fixture
async def without_critic(store: StateStore, redis: embedded.EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Process]:
    async with started(store, redis, tmp_path, {"actor": 1, "rollout": 1, "reward": 1}) as process:
        yield process


def tree(tmp_path: Path) -> dict[str, Any]:
    model = write_tiny_llama(tmp_path / "model")
    rows = [
        {"data_source": "t", "prompt": f"{i}+{i}=", "reward_model": {"ground_truth": str(2 * i)}} for i in range(10)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(REWARD)
    optimizer = {"optimizer": {"lr": 1e-3}, "micro_batch_size": 4}
    return {
        "total_steps": STEPS,
        "model": {"path": str(model)},
        "data": {"path": str(tmp_path / "data.jsonl"), "batch_size": 4},
        "rollout": {"engine": "hf", "n": 2, "replicas": 2, "max_tokens": 8, "slots": 4},
        "actor": optimizer,
        "critic": optimizer,
        "reward": {"function": f"{tmp_path / 'reward.py'}:compute_score"},
        "algorithm": {"kl": {"placement": "reward", "coef": 0.01}},
        "checkpoint": {"save_interval": 2},
        "recovery": {"replica_timeout": 120},
    }


async def play(sextet: Process, config: dict[str, Any], id: str, disturb: dict[int, tuple[str, int]]) -> dict[str, str]:
    """Plays a run; after the given steps a replica gets a signal. Digests of all that it leaves."""
    stub = await sextet.stub()
    await call(stub.CreateRun, pb.CreateRunRequest(config_json=json.dumps(config), id=id), timeout=30)
    async for answer in stream(stub.WatchRun, pb.WatchRunRequest(id=id), timeout=SECONDS):
        if answer.event.kind == "step" and (victim := disturb.pop(answer.event.step, None)):
            pids = {entry.replica: int(entry.facts["pid"]) for entry in await list_replicas(sextet.store)}
            os.kill(pids[victim[0]], victim[1])
    run = (await call(stub.GetRun, pb.GetRunRequest(id=id), timeout=30)).run
    assert (run.state, run.reason, run.step) == ("done", "", STEPS)
    assert not disturb
    return digests(Path(run.directory))


def digests(directory: Path) -> dict[str, str]:
    last = directory / "checkpoints" / f"step_{STEPS}"
    # rng.safetensors is the process's own generator, which no draw of a run comes from.
    saved = [path for path in sorted(last.glob("*/*.safetensors")) if path.name != "rng.safetensors"]
    files = [directory / "model" / "model.safetensors", *saved]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


async def test_killed_roles_change_no_bit_of_the_result(sextet: Process, tmp_path: Path) -> None:
    config = tree(tmp_path)
    undisturbed = await play(sextet, config, "undisturbed", {})
    assert len(undisturbed) == 5
    assert await play(sextet, config, "rollout", {1: ("rollout-1", signal.SIGKILL)}) == undisturbed
    assert await play(sextet, config, "others", {2: ("actor-0", signal.SIGKILL)}) == undisturbed
    lines = [json.loads(line) for line in (tmp_path / "runs" / "rollout" / "metrics.jsonl").read_text().splitlines()]
    assert {"reward", "kl", "response_length", "tokens_per_second", "actor.update/loss"} <= lines[0].keys()


async def test_critic_free_flows_play_without_critic_and_reference(without_critic: Process, tmp_path: Path) -> None:
    config = tree(tmp_path)
    config["rollout"]["replicas"] = 1
    for name in ("grpo", "remax", "dapo"):
        advantage = "remax" if name == "remax" else "grpo"
        config |= {"flow": name, "algorithm": {"advantage": advantage}}
        left = await play(without_critic, config, name, {})
        parts = ["optimizer", "model"]
        assert set(left) == {"model/model.safetensors"} | {
            f"checkpoints/step_{STEPS}/actor/{part}.safetensors" for part in parts
        }


async def test_pieces_change_no_bit_where_rows_are_computed_alone(sextet: Process, tmp_path: Path) -> None:
    config = tree(tmp_path)
    config["actor"] = config["critic"] = config["actor"] | {"micro_batch_size": 1}
    whole = await play(sextet, config, "whole", {})
    config["rollout"]["pieces"] = 3
    assert await play(sextet, config, "pieces", {}) == whole


async def test_samples_older_than_the_policy_survive_a_rollout_to_the_bit(sextet: Process, tmp_path: Path) -> None:
    config = tree(tmp_path) | {"flow": "async_ppo"}
    config["algorithm"] = config["algorithm"] | {"staleness": 2}
    config["rollout"] |= {"budget": 3, "min_tokens": 2}
    undisturbed = await play(sextet, config, "undisturbed", {})
    assert await play(sextet, config, "rollout", {2: ("rollout-1", signal.SIGKILL)}) == undisturbed
    lines = [json.loads(line) for line in (tmp_path / "runs" / "rollout" / "metrics.jsonl").read_text().splitlines()]
    ages = [line["rollout.ready/staleness_max"] for line in lines]
    assert ages[0] == 0
    assert max(ages) in (1, 2)
    assert any(line.get("rollout.generate/prompts_unfinished") for line in lines)
    assert "actor.advantages/rollout_weight_mean" in lines[0]
