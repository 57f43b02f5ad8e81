"""The front door as users have it: the `sextet` command in a directory of its own, with real services behind it."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sextet.client import Client
from sextet.endpoint import read_state
from tests.fakes.process import alive_with
from tests.fakes.tiny import write_tiny_llama

REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return solution_str.count('a') / 8\n"
)
COMMAND_SECONDS = 240


@dataclass(frozen=True)
class Home:
    """A directory with a tiny model, data and a grader.

    Attributes:
        mark: in the environment of every process started from here, and so of all that those start.
    """

    path: Path
    mark: str

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SEXTET_")}
        return {**kept, "SEXTET_TEST_MARK": self.mark, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """`sextet ARGUMENT...` in a session of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "sextet", *arguments],
            cwd=self.path,
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell that runs the tests in the background has them ignore SIGINT, and so this child.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def sextet(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """`sextet ARGUMENT...` to its end."""
        process = self.start(*arguments, **environ)
        out, err = process.communicate(timeout=COMMAND_SECONDS)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def leftovers(self) -> list[str]:
        """Command lines of processes that were started from here and still live."""
        return alive_with("SEXTET_TEST_MARK", self.mark)

    def client(self) -> Client:
        """A client of the services that are up here."""
        state = read_state(self.path / ".sextet")
        assert state is not None
        return Client(state.controller)

    def config(self, **sections: Any) -> dict[str, Any]:
        """A run of a few seconds; sections are merged into it."""
        tree: dict[str, Any] = {
            "total_steps": 3,
            "model": {"path": "model"},
            "data": {"path": "data.jsonl", "batch_size": 4},
            "rollout": {"engine": "hf", "n": 2, "max_tokens": 8, "slots": 4},
            "actor": {"optimizer": {"lr": 1e-3}, "micro_batch_size": 4},
            "critic": {"optimizer": {"lr": 1e-3}, "micro_batch_size": 4},
            "reward": {"function": "reward.py:compute_score"},
            "algorithm": {"kl": {"placement": "reward", "coef": 0.01}},
        }
        for name, value in sections.items():
            tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
        return tree

    def write(self, name: str, config: dict[str, Any]) -> str:
        """A configuration file; returns its name."""
        (self.path / name).write_text(json.dumps(config))
        return name


def make_home(path: Path) -> Home:
    write_tiny_llama(path / "model")
    rows = [
        {"data_source": "t", "prompt": f"{i}+{i}=", "reward_model": {"ground_truth": str(2 * i)}} for i in range(10)
    ]
    (path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "reward.py").write_text(REWARD)
    return Home(path, secrets.token_hex(8))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A directory without services; whatever the test starts must be gone at its end."""
    home = make_home(tmp_path)
    yield home
    assert home.leftovers() == []


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A directory with services that are up, for all tests that leave them as they were."""
    home = make_home(tmp_path_factory.mktemp("served"))
    up = home.sextet("up", "--rollouts", "2")
    assert up.returncode == 0, up.stderr
    yield home
    down = home.sextet("down")
    assert down.returncode == 0, down.stderr
    assert home.leftovers() == []
