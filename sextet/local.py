"""All services on one machine: Redis, the controller, and through the controller the five roles.

Everything started here ends with this process, however it ends: children ask the kernel for SIGTERM when their parent
dies (shared.rpc.lifetime). The roles are children of the controller, which drains them before it leaves.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import psutil

from sextet.client import Client
from sextet.endpoint import STATE_DIR, LocalState, made_at, read_state, write_state
from sextet.lastwords import last_words
from shared.rpc.errors import DeadlineExceeded, SextetError, Unavailable
from shared.rpc.lifetime import PARENT_VARIABLE
from shared.rpc.token import client_token
from shared.state import open_store
from shared.state.embedded import EmbeddedRedis, start_redis
from shared.state.registry import Replica, list_replicas

T = TypeVar("T")
ROLES = ("rollout", "actor", "critic", "reward", "reference")
START_SECONDS = 180.0
"""Six processes that import torch on two busy cores take 20 s; a cold disk several times that."""
DRAIN_SECONDS = 5
STOP_SECONDS = 40.0
POLL_SECONDS = 0.1
SPAWN_SECONDS = 5.0
"""A process that was just forked still bears its parent's command line, so for a moment it can't be told by name."""


class LocalError(Exception):
    """The services can't be started here; the text says why and what to change."""

    def __init__(self, message: str, exit_code: int = 3) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LocalServices:
    """The six services of this directory, as a context manager.

    Args:
        directory: state, logs and the embedded Redis' data.
        replicas: of each role; default 1.
        redis_url: a Redis to use; default: an embedded one.
        port: of the controller's gRPC API; 0 picks a free one.
        http_port: of its HTTP API; 0 picks a free one.
        threads: that each process computes with; default: OMP_NUM_THREADS, else all cores.
        devices: "ROLE=N,N" (shared.devices); of a role that is not named: all. Default: SEXTET_DEVICES, else none.
        tell: told in a line what is going on.
    """

    def __init__(
        self,
        directory: Path = STATE_DIR,
        *,
        replicas: Mapping[str, int] | None = None,
        redis_url: str | None = None,
        port: int = 0,
        http_port: int = 0,
        threads: int | None = None,
        devices: Sequence[str] = (),
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._directory, self._logs = directory.absolute(), directory.absolute() / "logs"
        self._replicas = dict.fromkeys(ROLES, 1) | dict(replicas or {})
        self._redis_url, self._port, self._http_port, self._tell = redis_url, port, http_port, tell
        self._threads = str(threads or os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
        self._devices = " ".join(devices) or os.environ.get("SEXTET_DEVICES", "")
        self._lock: IO[str] | None = None
        self._redis: EmbeddedRedis | None = None
        self._controller: subprocess.Popen[bytes] | None = None
        self.endpoint = ""
        self.http = ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, timeout: float = START_SECONDS) -> None:
        """Starts all and waits until all are ready.

        Raises:
            LocalError: they run here already, one of them ended, or `timeout` seconds are over.
        """
        until = time.monotonic() + timeout
        # Made before its users start together.
        client_token()
        self._take_lock()
        state = LocalState(os.getpid(), made_at(os.getpid()))
        write_state(state, self._directory)
        for flag, port in (("--port", self._port), ("--http-port", self._http_port)):
            _refuse_taken(port, flag)
        url = self._redis_url or self._start_redis()
        self._tell("starting the controller")
        self._start_controller(url)
        controller = self._wait_for_controller(url, until)
        self.endpoint, self.http = controller.endpoint, controller.facts.get("http", "")
        with Client(self.endpoint) as client:
            for role, count in self._replicas.items():
                self._asked(partial(client.scale, role, count, at_once=True), until)
            self._wait_for_roles(client, until)
        write_state(LocalState(state.pid, state.created, True, self.endpoint, self.http, url), self._directory)

    def check(self) -> None:
        """Raises LocalError when the controller has ended."""
        if self._controller and self._controller.poll() is not None:
            raise LocalError(self._cause("controller", _ended(self._controller.returncode)))

    def mend(self) -> None:
        """Starts the embedded Redis again if it has ended, where all look for it. In the thread that `start` was in.

        Raises:
            LocalError: it can't be started.
        """
        if self._redis and self._redis.process.poll() is not None:
            self._start_redis(self._redis.port)

    def stop(self) -> None:
        """Ends all in order: the controller drains and ends the roles, Redis goes last. Ctrl-C meanwhile: at once."""
        with _hurry() as hurry:
            if self._controller:
                _end(self._controller, time.monotonic() + STOP_SECONDS, hurry)
            if self._redis:
                self._redis.stop()
            self._controller = self._redis = None
        if self._lock:
            (self._directory / "local.json").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (self._directory / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            pid = state.pid if (state := read_state(self._directory)) else "?"
            raise LocalError(already_up(pid)) from None
        self._lock = lock

    def _start_redis(self, port: int = 0) -> str:
        self._tell("starting Redis")
        try:
            self._redis = start_redis(self._directory / "redis", port)
        except RuntimeError as error:
            raise LocalError(str(error)) from None
        return self._redis.url

    def _start_controller(self, url: str) -> None:
        for old in self._logs.glob("*-*.log"):
            old.unlink()
        settings = {
            "SEXTET_REDIS_URL": url,
            "SEXTET_SCALER": "process",
            "SEXTET_LOG_DIR": str(self._logs),
            "SEXTET_DATA_DIR": str(self._directory),
            "SEXTET_DRAIN_TIMEOUT": os.environ.get("SEXTET_DRAIN_TIMEOUT", str(DRAIN_SECONDS)),
            "OMP_NUM_THREADS": self._threads,
            "SEXTET_THREADS": self._threads,
            "SEXTET_DEVICES": self._devices,
            PARENT_VARIABLE: str(os.getpid()),
        }
        addresses = ["--bind", f"127.0.0.1:{self._port}", "--http", f"127.0.0.1:{self._http_port}"]
        with (self._logs / "controller.log").open("wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches us alone, and we stop the others in order.
            self._controller = subprocess.Popen(
                [sys.executable, "-m", "services.controller", "--replica", "controller-0", *addresses],
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_for_controller(self, url: str, until: float) -> Replica:
        assert self._controller
        while True:
            self.check()
            # The entry of an earlier one may be there for a few seconds after a kill -9.
            for replica in _controllers(url):
                if replica.facts.get("pid") == str(self._controller.pid):
                    return replica
            self._sleep(until, "controller", "did not register")

    def _wait_for_roles(self, client: Client, until: float) -> None:
        told: set[str] = set()
        seen: set[str] = set()
        spawned = time.monotonic() + SPAWN_SECONDS
        while True:
            self.check()
            found = self._asked(client.services, until)
            ready = [service.replica for service in found if service.state in ("ready", "busy")]
            missing = [name for name in self._names() if name not in ready]
            for name in sorted(set(ready) - told):
                if name in self._names():
                    self._tell(f"{name} is ready")
            told.update(ready)
            if not missing:
                return
            alive = self._running()
            seen |= alive
            for name in missing:
                if name not in alive and (name in seen or time.monotonic() > spawned):
                    raise LocalError(self._cause(name, "ended while it was starting"))
            self._sleep(until, missing[0], "did not become ready")

    def _asked(self, ask: Callable[[], T], until: float) -> T:
        """What the controller answers. While all start, it or Redis may be out of reach for seconds."""
        while True:
            try:
                return ask()
            except (Unavailable, DeadlineExceeded):
                self.check()
                if time.monotonic() > until:
                    raise
            time.sleep(POLL_SECONDS)

    def _names(self) -> list[str]:
        return [f"{role}-{number}" for role, count in self._replicas.items() for number in range(count)]

    def _running(self) -> set[str]:
        """Replica names among the controller's child processes: a forked one bears its name, others have it last."""
        assert self._controller
        names: set[str] = set()
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._controller.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    names.update([child.name(), *child.cmdline()[-1:]])
        return names

    def _sleep(self, until: float, name: str, what: str) -> None:
        if time.monotonic() > until:
            raise LocalError(self._cause(name, f"{what} in time"))
        time.sleep(POLL_SECONDS)

    def _cause(self, name: str, what: str) -> str:
        log = self._logs / f"{name}.log"
        return f"{name} {what}: {last_words(log)} (log: {log})"


def _refuse_taken(port: int, flag: str) -> None:
    """Before six processes are started for nothing; that the controller binds it later is not certain, only likely."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LocalError(
                f"{flag} {port} can't be used ({error.strerror}): name another, or 0 for a free one"
            ) from None


def already_up(pid: int | str) -> str:
    return f"services run in this directory already (process {pid}), perhaps for a run: `sextet down` would end them"


def _ended(code: int) -> str:
    return f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"


def _controllers(url: str) -> list[Replica]:
    async def listed() -> list[Replica]:
        store = open_store(url)
        try:
            return await list_replicas(store, "controller")
        finally:
            await store.close()

    try:
        # In a thread of its own: a notebook's runs an event loop already.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, listed()).result()
    except SextetError:
        # The controller itself says so, in its log and with its exit code.
        return []
    except ValueError as error:
        raise LocalError(str(error)) from None


@contextlib.contextmanager
def _hurry() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM meanwhile; they mean "faster" and must not break off the tearing down."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before: dict[int, Any] = {
        number: signal.signal(number, lambda got, _: signals.append(got)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes], until: float, hurry: list[int]) -> None:
    """SIGTERM, time to drain, then SIGKILL for it and for all that it started."""
    family = _family(process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    while process.poll() is None and time.monotonic() < until and not hurry:
        time.sleep(POLL_SECONDS / 2)
        family |= _family(process.pid)
    if process.poll() is None:
        process.kill()
    process.wait()
    # Its children hear SIGTERM from the kernel; the ones still here after a moment do not listen.
    _, stubborn = psutil.wait_procs(list(family), timeout=0.2 if hurry else 3.0)
    for child in stubborn:
        with contextlib.suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(stubborn, timeout=3.0)


def _family(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return set()
