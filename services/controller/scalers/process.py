"""Replicas as processes on this machine: `python -m services.<role>`, ended with whoever started them.

They are forked from a process that has imported torch and all else (shared.rpc.forkserver), so that one that died is
back in half a second instead of four. On a machine with GPUs each begins from nothing, as CUDA does not survive a fork.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from shared.devices import Devices
from shared.rpc.forkserver import Forked, ForkServer
from shared.rpc.lifetime import PARENT_VARIABLE
from shared.rpc.server import EXIT_SETTINGS

log = structlog.get_logger()

DRAIN_SECONDS = 25.0
RESTART_SECONDS = (0.2, 10.0)
"""Wait before a replica that ended by itself is started again: at first, doubling, and at most."""
STEADY_SECONDS = 60.0
"""Who lived that long is restarted without further delay."""
PRELOADED = ("rollout", "actor", "critic", "reference", "reward")
GPUS = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class Started:
    """A replica's process; `log` is the file that holds its standard error."""

    role: str
    replica: str
    process: asyncio.subprocess.Process | Forked
    log: Path

    @property
    def running(self) -> bool:
        return self.process.returncode is None


class ProcessScaler:
    """Starts, lists and stops replicas, and starts again those that end by themselves.

    Children die with this process; stopping drains them first.

    Args:
        log_dir: a log file per replica.
        command: a role's command line; default: `python -m services.<role>`, forked where there is no GPU.
        env: added to this process's environment; where secrets go, since command lines are public.
        drain: seconds between SIGTERM and SIGKILL.
        devices: on which each role computes.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        command: Callable[[str], Sequence[str]] | None = None,
        env: Mapping[str, str] | None = None,
        drain: float = DRAIN_SECONDS,
        devices: Devices | None = None,
    ) -> None:
        self._log_dir, self._env, self._drain = log_dir, dict(env or {}), drain
        self._devices = devices or Devices()
        self._command = command or (lambda role: (sys.executable, "-m", f"services.{role}"))
        modules = [f"services.{role}.__main__" for role in PRELOADED]
        forks = command is None and not GPUS.exists()
        self._forks = ForkServer(modules, log_dir / "forkserver.log", self._environment({})) if forks else None
        self._started: dict[str, Started] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._lock = asyncio.Lock()

    def list(self, role: str | None = None) -> "list[Started]":
        """Replicas kept here, also those that are about to be started again, in order of start."""
        return [each for each in self._started.values() if role in (None, each.role)]

    async def start(self, role: str, replica: str = "", env: Mapping[str, str] | None = None) -> Started:
        """Starts a replica, and again whenever it ends by itself; it is usable once it has registered."""
        replica = replica or self._free_name(role)
        if known := self._started.get(replica):
            raise ValueError(f"replica {replica!r} is kept here already (pid {known.process.pid})")
        started = await self._spawn(role, replica, env or {})
        self._keepers[replica] = asyncio.create_task(self._keep(started, env or {}))
        return started

    async def stop(self, replica: str) -> int:
        """SIGTERM, and SIGKILL once the time to drain is over; returns the exit code."""
        keeper = self._keepers[replica]
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        started = self._started[replica]
        if started.running:
            started.process.terminate()
            try:
                async with asyncio.timeout(self._drain):
                    await started.process.wait()
            except TimeoutError:
                started.process.kill()
        code = await started.process.wait()
        # Not before: who waited for it may have gone, and it must be stopped the next time.
        del self._started[replica], self._keepers[replica]
        return code

    async def scale(self, role: str, replicas: int) -> tuple[int, int]:
        """See Scaler; the youngest go first."""
        async with self._lock:
            for each in self.list(role):
                if self._keepers[each.replica].done():
                    await self.stop(each.replica)
            kept = [each.replica for each in self.list(role)]
            for _ in range(len(kept), replicas):
                await self.start(role)
            await asyncio.gather(*(self.stop(replica) for replica in kept[replicas:]))
            return len(kept), replicas

    async def close(self) -> None:
        """Stops all, at the same time."""
        await asyncio.gather(*(self.stop(replica) for replica in list(self._keepers)))
        if self._forks:
            await self._forks.close()

    async def _keep(self, started: Started, env: Mapping[str, str]) -> None:
        first, most = RESTART_SECONDS
        delay = first
        while True:
            since = time.monotonic()
            code = await started.process.wait()
            log.warning("replica ended by itself", ended_replica=started.replica, code=code, log=str(started.log))
            if code == EXIT_SETTINGS:
                # It said what is wrong with its settings, and would say the same again.
                return
            delay = first if time.monotonic() - since > STEADY_SECONDS else min(2 * delay, most)
            await asyncio.sleep(delay)
            try:
                started = await self._spawn(started.role, started.replica, env)
            except OSError as error:
                # No memory for another process, or a fork server that ended: later there may be.
                log.error("replica can't be started", ended_replica=started.replica, error=str(error))

    async def _spawn(self, role: str, replica: str, env: Mapping[str, str]) -> Started:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log_file = self._log_dir / f"{replica}.log"
        places = self._devices.environment(role, replica)
        process = await self._begin(role, replica, self._environment({**places, **env}), log_file)
        log.info("replica started", started_role=role, started_replica=replica, pid=process.pid)
        self._started[replica] = Started(role, replica, process, log_file)
        return self._started[replica]

    async def _begin(
        self, role: str, replica: str, env: Mapping[str, str], log_file: Path
    ) -> asyncio.subprocess.Process | Forked:
        """Either way in a session of its own: Ctrl-C reaches the launcher, which then drains its children in order."""
        if self._forks:
            return await self._forks.spawn([f"services.{role}", "--replica", replica], env, log_file, replica)
        with log_file.open("ab") as file:
            return await asyncio.create_subprocess_exec(
                *self._command(role),
                "--replica",
                replica,
                env={**env, PARENT_VARIABLE: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        # A child must not bind where its parent does.
        inherited = {name: value for name, value in os.environ.items() if name not in ("SEXTET_BIND", "SEXTET_REPLICA")}
        return {**inherited, **self._env, **env}

    def _free_name(self, role: str) -> str:
        number = 0
        while f"{role}-{number}" in self._started:
            number += 1
        return f"{role}-{number}"
