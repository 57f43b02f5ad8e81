"""Bad input: each ends in time, in one clear message that names what to change, with an exit code, nothing left."""

import json
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Home

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def refusal(ended: Any, code: int, *words: str) -> None:
    """The last line on stderr says it, and no traceback does."""
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("sextet: ")
    for word in words:
        assert word in last


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.optimzer.lr=1", ["actor.optimzer", "did you mean 'actor.optimizer'"]),
        ("rollout.n=0", ["rollout.n", "greater than 0"]),
        ("rollout.top_p=0.5", ["rollout.top_p", "algorithm.correction.mode"]),
        ("flow", ["flow", "key=value"]),
    ],
)
def test_configuration(home: Home, override: str, words: list[str]) -> None:
    refusal(home.sextet("run", home.write("run.json", home.config()), override), 2, *words)


def test_missing_file_and_missing_services(home: Home) -> None:
    refusal(home.sextet("run", "nix.yaml"), 2, "nix.yaml", "does not exist")
    refusal(home.sextet("runs"), 3, "sextet up", "SEXTET_CONTROLLER")
    refusal(home.sextet("runs", SEXTET_CONTROLLER="127.0.0.1:1"), 3, "127.0.0.1:1")


def test_port_in_use(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refusal(home.sextet("up", "--port", str(port)), 3, f"port {port} is in use")
    assert home.leftovers() == []


def test_redis_not_reachable(home: Home) -> None:
    refusal(home.sextet("up", "--redis", "redis://127.0.0.1:1/0"), 3, "Redis", "127.0.0.1:1")
    assert home.leftovers() == []


def test_devices(home: Home) -> None:
    refusal(home.sextet("up", "--devices", "actr=0"), 2, "--devices", "'actr'", "did you mean actor=0?")
    refusal(home.sextet("up", SEXTET_DEVICES="actor=0 critic=x"), 2, "SEXTET_DEVICES", "'critic=x'", "write critic=0")
    config = home.write("run.json", home.config())
    refusal(home.sextet("run", config, SEXTET_DEVICES="actor=x"), 3, "SEXTET_DEVICES", "'actor=x'", "write actor=0")
    assert home.leftovers() == []


def test_unusable_token(home: Home) -> None:
    refusal(home.sextet("up", SEXTET_TOKEN="short"), 2, "SEXTET_TOKEN", "16")


def test_wrong_token(served: Home) -> None:
    from sextet.endpoint import read_state

    state = read_state(served.path / ".sextet")
    assert state is not None
    wrong = {"SEXTET_CONTROLLER": state.controller, "SEXTET_TOKEN": "wrong-" * 5}
    refusal(served.sextet("runs", **wrong), 3, "token", "SEXTET_TOKEN")


def rows(home: Home, name: str, *prompts: Any) -> str:
    lines = [{"data_source": "t", "prompt": prompt, "reward_model": {"ground_truth": "1"}} for prompt in prompts]
    (home.path / name).write_text("\n".join(map(json.dumps, lines)))
    return name


def bad_inputs(home: Home) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """A configuration for each bad input, and what its message has to name."""
    (home.path / "columns.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    return {
        "model": ({"model": {"path": "no/such-model-dir"}}, ["no/such-model-dir"]),
        "dataset": ({"data": {"path": "nix.parquet"}}, ["nix.parquet"]),
        "columns": ({"data": {"path": "columns.jsonl"}}, ["columns.jsonl", "prompt"]),
        "empty prompt": ({"data": {"path": rows(home, "empty.jsonl", "")}}, ["empty"]),
        "over-long prompt": (
            {"data": {"path": rows(home, "long.jsonl", "1" * 99), "max_prompt_tokens": 20}},
            ["20", "max_prompt_tokens"],
        ),
        "reward function": ({"reward": {"function": "reward.py:nix"}}, ["reward.py", "nix"]),
        "reward endpoint": (
            {
                "reward": {"backend": "grpc", "endpoint": "127.0.0.1:1", "function": None, "timeout": 2},
                "recovery": {"replica_timeout": 5},
            },
            ["reward.endpoint", "127.0.0.1:1"],
        ),
    }


KINDS = ("model", "dataset", "columns", "empty prompt", "over-long prompt", "reward function", "reward endpoint")


@pytest.mark.parametrize("kind", KINDS)
def test_run_that_cannot_be(served: Home, kind: str) -> None:
    sections, words = bad_inputs(served)[kind]
    started = time.monotonic()
    ended = served.sextet("run", served.write("bad.json", served.config(**sections)))
    refusal(ended, 1, *words)
    assert time.monotonic() - started < 90


def test_role_that_is_missing(served: Home) -> None:
    with served.client() as client:
        client.scale("reference", 0)
        try:
            config = served.config(recovery={"replica_timeout": 3})
            refusal(served.sextet("run", served.write("bad.json", config)), 1, "reference")
        finally:
            client.scale("reference", 1)
            until = time.monotonic() + 90
            while not any(each.role == "reference" for each in client.services()):
                assert time.monotonic() < until
                time.sleep(0.2)


def test_role_that_cannot_start(home: Home) -> None:
    """The message has the last words of the service's log."""
    ended = home.sextet("up", SEXTET_FETCH_TIMEOUT="-1")
    refusal(ended, 3, "rollout-0 ended while it was starting", "SEXTET_FETCH_TIMEOUT")
    assert home.leftovers() == []


@pytest.mark.parametrize("when", ["imports", "start-up", "roles", "steps"])
def test_ctrl_c_leaves_nothing(home: Home, when: str) -> None:
    """SIGINT to `sextet run` at some moment of each stage; what is left is looked for by the fixture, too."""
    config = home.write("run.json", home.config(total_steps=100_000))
    process = home.start("run", config)
    try:
        _wait_for(home.path / ".sextet" / "logs", when)
        time.sleep(random.random())
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert home.leftovers() == []
    assert not (home.path / ".sextet" / "local.json").exists()


def test_killed_command_takes_its_services_along(home: Home) -> None:
    """kill -9 of the command: the kernel tells its children."""
    process = home.start("up", "--foreground")
    _wait_for(home.path / ".sextet" / "logs", "roles")
    process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 30
    while home.leftovers():
        assert time.monotonic() < until, home.leftovers()
        time.sleep(0.2)


def _wait_for(logs: Path, stage: str) -> None:
    """Until the log files show that the services have come so far."""
    reached = {
        "imports": lambda: True,
        "start-up": lambda: (logs / "controller.log").exists(),
        "roles": lambda: (logs / "rollout-0.log").exists(),
        "steps": lambda: "step 2 of" in _text(logs / "controller.log"),
    }[stage]
    until = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < until, f"{stage} not reached"
        time.sleep(0.05)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
