"""Runs through the command and the client: six real processes, a real Redis, a tiny model."""

import hashlib
import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from safetensors.numpy import load_file

from sextet.client import AsyncClient, Client
from sextet.endpoint import read_state
from shared.gen.sextet.v1 import controller_pb2 as pb
from tests.integration.conftest import Home

pytestmark = pytest.mark.timeout(300)
ROLES = {"rollout", "actor", "critic", "reward", "reference"}


def events(client: Client, id: str) -> dict[str, list[pb.RunEvent]]:
    """All events of a run, by kind, once it is over."""
    found: dict[str, list[pb.RunEvent]] = defaultdict(list)
    for event in client.watch(id):
        found[event.kind].append(event)
    return found


def digest(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def test_ppo_crosses_six_processes(served: Home) -> None:
    """The command's JSON, the run's files, and a summary with seconds for every role call."""
    ended = served.sextet("run", served.write("ppo.json", served.config()), "seed=3", "--json")

    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    run, paths = lines[-1]["run"], lines[-1]["paths"]
    assert (run["state"], run["step"], run["config"]["seed"]) == ("done", 3, 3)
    assert [line["step"] for line in lines if line.get("kind") == "step"] == [1, 2, 3]
    calls = {line["message"].partition(".")[0] for line in lines if line.get("kind") == "call"}
    assert calls >= ROLES
    summary = json.loads(Path(paths["summary"]).read_text())
    assert {"rollout.generate", "critic.update", "actor.update", "reference.logprobs"} <= set(summary["calls"])
    before, after = load_file(served.path / "model/model.safetensors"), load_file(f"{paths['model']}/model.safetensors")
    assert any((before[name] != after[name]).any() for name in before)


def test_grpo_needs_no_critic(served: Home) -> None:
    config = served.config(flow="grpo", total_steps=2, algorithm={"advantage": "grpo"})
    with served.client() as client:
        seen = events(client, client.create_run(config).id)
    assert len(seen["step"]) == 2
    assert not [event for event in seen["call"] if event.message.startswith("critic")]
    assert seen["state"][-1].message == "done"


def test_validation_looks_at_the_policy_and_changes_nothing(served: Home) -> None:
    """Before, every second step and at the end; the run's own numbers are the same bit for bit without it."""
    looked = {"validation_path": "data.jsonl", "validation_interval": 2}
    with served.client() as client:
        runs = [client.create_run(served.config(data=data)) for data in ({}, looked)]
        plain, seen = (events(client, run.id) for run in runs)
    assert [event.step for event in seen["validation"]] == [0, 2, 3]
    numbers = seen["validation"][-1].metrics
    assert numbers["reward.score/count"] == 10, dict(numbers)
    assert numbers["reward"] == numbers["reward.score/mean"]
    # Sampling's own means depend in their last digits, or more, on how many rollouts shared a step.
    timed = ("second", "memory", "rollout.generate/")
    for one, other in zip(plain["step"], seen["step"], strict=True):
        same = {name: value for name, value in one.metrics.items() if not any(word in name for word in timed)}
        assert same == {name: other.metrics[name] for name in same}


def test_received_bytes_do_not_grow_with_the_answers(served: Home) -> None:
    """Law 1: the controller gets eight times the tokens for the same bytes."""
    with served.client() as client:
        spent: dict[int, dict[str, float]] = {}
        for tokens in (8, 64):
            config = served.config(total_steps=2, rollout={"max_tokens": tokens, "min_tokens": tokens})
            before = received(client)
            seen = events(client, client.create_run(config).id)
            spent[tokens] = {call: total - before.get(call, 0) for call, total in received(client).items()}
            assert seen["step"][-1].metrics["response_length"] == tokens
    # The rows may reach one rollout in one piece or two in two (500 bytes a piece); the ids alone would weigh this:
    ids = 2 * 4 * 2 * (64 - 8) * 4
    for call in ("rollout.generate", "reward.score", "reference.logprobs", "critic.update", "actor.update"):
        assert spent[8][call] > 0
        assert spent[64][call] - spent[8][call] < ids / 2, (call, spent)


def received(client: Client) -> dict[str, float]:
    """Bytes of role responses at the controller so far, by call."""
    facts = next(each.facts for each in client.services() if each.role == "controller")
    with urlopen(f"http://{facts['metrics']}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    counted = [line for line in lines if line.startswith("sextet_controller_received_bytes_total{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in counted}


def test_a_killed_rollout_costs_no_sample(served: Home) -> None:
    """kill -9 of one of two while they generate: the step completes with every sample once."""
    config = served.config(total_steps=3, rollout={"replicas": 2, "max_tokens": 64, "min_tokens": 64})
    with served.client() as client:
        run = client.create_run(config)
        victim = None
        numbers = []
        for event in client.watch(run.id):
            if event.kind == "step":
                numbers.append(event)
                if victim is None:
                    victim = next(each for each in client.services() if each.replica == "rollout-1")
                    os.kill(int(victim.facts["pid"]), signal.SIGKILL)
        assert victim is not None
        assert client.get_run(run.id).state == "done"
        assert [event.step for event in numbers] == [1, 2, 3]
        assert [event.metrics["actor.advantages/rows"] for event in numbers] == [8, 8, 8]
        assert [event.metrics["rollout.generate/response_tokens"] for event in numbers] == [8 * 64] * 3
        client.scale("rollout", 2)
        wait(lambda: sum(each.role == "rollout" for each in client.services()) == 2)


def test_pause_resume_cancel(served: Home) -> None:
    with served.client() as client:
        run = client.create_run(served.config(total_steps=1000))
        wait(lambda: client.get_run(run.id).step >= 1)
        client.pause(run.id)
        wait(lambda: client.get_run(run.id).state == "paused")
        paused = client.get_run(run.id).step
        time.sleep(1)
        assert client.get_run(run.id).step == paused
        client.resume(run.id)
        wait(lambda: client.get_run(run.id).step > paused)
        directory, step = client.checkpoint(run.id)
        assert step > paused
        assert Path(directory, "run.json").is_file()
        assert client.cancel(run.id).state == "cancelled"
        assert events(client, run.id)["state"][-1].message == "cancelled"
        wait(lambda: not any(each.run for each in client.services() if each.role != "controller"))


def test_a_run_from_a_checkpoint_ends_as_the_run_it_is_from(served: Home) -> None:
    """Law 7: two steps and a new run of two more give the weights of four steps, bit for bit."""
    saving = {"save_interval": 2, "keep": 5}
    with served.client() as client:
        whole = client.create_run(served.config(total_steps=4, checkpoint=saving))
        events(client, whole.id)
        half = Path(whole.directory) / "checkpoints" / "step_2"
        rest = client.create_run(served.config(total_steps=4, checkpoint=saving, resume_from=str(half)))
        assert [event.step for event in events(client, rest.id)["step"]] == [3, 4]
    assert digest(Path(whole.directory) / "model") == digest(Path(rest.directory) / "model")


async def test_async_client(served: Home) -> None:
    state = read_state(served.path / ".sextet")
    assert state is not None
    async with AsyncClient(state.controller) as client:
        run = await client.create_run(served.config(total_steps=1))
        kinds = [event.kind async for event in client.watch(run.id)]
        assert "step" in kinds
        assert (await client.get_run(run.id)).state == "done"
        assert {each.role for each in await client.services()} == ROLES | {"controller"}


def test_commands_for_scripts(served: Home) -> None:
    """--json on stdout, and exit codes."""
    config = served.write("one.json", served.config(total_steps=1))
    queued = json.loads(served.sextet("run", config, "--detach", "--json").stdout)
    watched = served.sextet("watch", queued["id"])
    assert watched.returncode == 0
    assert "step 1/1" in watched.stderr
    assert "actor.update" in watched.stderr
    assert queued["id"] in [run["id"] for run in json.loads(served.sextet("runs", "--json").stdout)]
    services = json.loads(served.sextet("services", "--json").stdout)
    assert {service["role"] for service in services} == ROLES | {"controller"}
    assert "device" in served.sextet("services").stdout
    assert served.sextet("pause", queued["id"]).returncode == 2
    again = served.sextet("up")
    assert again.returncode == 3
    assert "run in this directory already" in again.stderr


def wait(condition: Any, seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.1)
