"""Six services and Redis as processes of their own: who dies is started again under its name, the others go on."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.failpoints import STRUCK
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.gen.sextet.v1 import controller_pb2_grpc
from shared.rpc.client import Connections, call
from shared.rpc.errors import SextetError
from shared.rpc.forkserver import Forked, ForkServer
from shared.state import embedded
from tests.fakes.sextet import TOKEN
from tests.fakes.tiny import write_tiny_llama

ROLES = ("controller", "actor", "critic", "rollout", "reward", "reference")
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    "    return sum(map(ord, solution_str)) % 7 / 7\n"
)
ROWS = 10
SECONDS = 120
RESTART_SECONDS = 0.05
LEASE_SECONDS = "1.5"
KILLED = -signal.SIGKILL


@dataclass
class Ended:
    """A process that ended by itself."""

    replica: str
    code: int
    at: float


@dataclass
class Cluster:
    """The processes. Places armed with `arm` strike once.

    Args:
        directory: for all that they write.
        replicas: how many of each role; one when not named.
        environ: added to theirs.
    """

    directory: Path
    replicas: Mapping[str, int] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    processes: dict[str, Forked] = field(default_factory=dict)

    async def __aenter__(self) -> "Cluster":
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "points").mkdir()
        self.redis = await asyncio.to_thread(embedded.start_redis, self.directory / "redis")
        self.port = _free_port()
        self.connections = Connections(TOKEN)
        (self.directory / "logs").mkdir()
        modules = [f"services.{role}.__main__" for role in ROLES]
        self._forks = ForkServer(modules, self.directory / "logs" / "forkserver.log", self._environment())
        self._keepers = {
            name: asyncio.create_task(self._keep(role, name)) for role in ROLES for name in self._names(role)
        }
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
        await self._forks.close()
        await self.connections.close()
        await asyncio.to_thread(self.redis.stop)

    @property
    def stub(self) -> Any:
        """The controller's service; it always listens on the same port."""
        return controller_pb2_grpc.ControllerServiceStub(self.connections.channel(f"127.0.0.1:{self.port}"))

    def arm(self, point: str, action: str = "kill") -> None:
        """The next process that reaches the point, also `point@role`, does the action once."""
        draft = self.directory / f"{point}.new"
        draft.write_text(action)
        draft.rename(self.directory / "points" / point)

    def struck(self, point: str) -> bool:
        """An armed point was reached; forgets it."""
        struck = self.directory / "points" / f"{point}{STRUCK}"
        if struck.exists():
            struck.unlink()
            return True
        return False

    def signal(self, replica: str, number: int) -> None:
        self.processes[replica].send_signal(number)

    async def create(self, id: str, config: Mapping[str, Any]) -> None:
        """Queues a run, however long the services need to start."""
        request = pb.CreateRunRequest(config_json=json.dumps(config), id=id)
        await self.answered(lambda: call(self.stub.CreateRun, request, timeout=10))

    async def run(self, id: str) -> pb.Run:
        return (await self.answered(lambda: call(self.stub.GetRun, pb.GetRunRequest(id=id), timeout=5))).run

    async def end(self, id: str, seconds: float = SECONDS) -> pb.Run:
        """Waits for the run's end."""
        async with asyncio.timeout(seconds):
            while True:
                if (run := await self.run(id)).state in ("done", "failed", "cancelled", "paused"):
                    return run
                await asyncio.sleep(0.2)

    async def answered(self, ask: Any) -> Any:
        """Asks the controller until one answers: it may be one of those that die."""
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    return await ask()
                except SextetError as error:
                    if not error.retryable:
                        raise
                    await asyncio.sleep(0.2)

    async def until(self, what: str, true: Any, seconds: float = SECONDS) -> None:
        """Waits until `true()`; says what was waited for."""
        until = time.monotonic() + seconds
        while not true():
            if time.monotonic() > until:
                raise TimeoutError(f"not within {seconds:g} s: {what}; logs are in {self.directory / 'logs'}")
            await asyncio.sleep(0.02)

    def journal(self, id: str) -> list[dict[str, Any]]:
        """The run's journal as it is on disk."""
        return read_lines(self.directory / "runs" / id / "journal.jsonl")

    def step(self, id: str) -> int:
        """Steps committed, by the journal."""
        positions = [line["step"] for line in self.journal(id) if line["kind"] != "issue"]
        return positions[-1] if positions else 0

    def applied(self, id: str) -> dict[str, list[dict[str, Any]]]:
        """What each replica noted to have applied for the run, oldest first."""
        found = {}
        for path in sorted((self.directory / "data").glob("*/history/*.jsonl")):
            older = read_lines(path.with_name(path.name + ".1"))
            found[path.stem] = [line for line in older + read_lines(path) if line["run"] == id]
        return found

    def sha256(self, id: str) -> str:
        """Of the model that the run exported."""
        return hashlib.sha256((self.directory / "runs" / id / "model" / "model.safetensors").read_bytes()).hexdigest()

    def _names(self, role: str) -> list[str]:
        return [f"{role}-{number}" for number in range(self.replicas.get(role, 1))]

    async def _keep(self, role: str, name: str) -> None:
        while True:
            process = self.processes[name] = await self._spawn(role, name)
            code = await process.wait()
            self.ended.append(Ended(name, code, time.monotonic()))
            await asyncio.sleep(RESTART_SECONDS)

    async def _spawn(self, role: str, name: str) -> Forked:
        """As the process scaler does it; the controller, too."""
        flags = ["--replica", name, "--data-dir", str(self.directory / "data" / name), "--metrics-port", "-1"]
        if role == "controller":
            flags += ["--runs-dir", str(self.directory / "runs"), "--bind", f"127.0.0.1:{self.port}"]
        log = self.directory / "logs" / f"{name}.log"
        return await self._forks.spawn([f"services.{role}", *flags], self._environment(), log, name)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SEXTET_TOKEN": TOKEN,
            "SEXTET_REDIS_URL": self.redis.url,
            "SEXTET_LEASE_TTL": LEASE_SECONDS,
            "SEXTET_FAILPOINTS": f"@{self.directory / 'points'}",
            "OMP_NUM_THREADS": "1",
            **self.environ,
        }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file that may still be written to."""
    if not path.exists():
        return []
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def run_config(directory: Path, **changes: Any) -> dict[str, Any]:
    """A PPO run of short steps on a tiny model, which the directory holds afterwards; a__b=c sets a.b."""
    if not (directory / "model").exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_tiny_llama(directory / "model")
        rows = [
            {"data_source": "t", "prompt": f"{i}+{i}=", "reward_model": {"ground_truth": str(2 * i)}}
            for i in range(ROWS)
        ]
        (directory / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (directory / "reward.py").write_text(REWARD)
    trained = {"optimizer": {"lr": 1e-3}, "micro_batch_size": 4}
    tree: dict[str, Any] = {
        "total_steps": 4,
        "model": {"path": str(directory / "model")},
        "data": {"path": str(directory / "data.jsonl"), "batch_size": 2},
        "rollout": {"engine": "hf", "n": 2, "max_tokens": 6, "slots": 4},
        "actor": dict(trained),
        "critic": dict(trained),
        "reward": {"function": f"{directory / 'reward.py'}:compute_score"},
        "algorithm": {"kl": {"placement": "reward", "coef": 0.01}},
        "checkpoint": {"save_interval": 1},
        "recovery": {"replica_timeout": 60},
    }
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (tree[section] if section else tree)[name] = value
    return tree


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
