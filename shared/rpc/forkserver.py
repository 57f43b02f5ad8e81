"""New processes without the seconds that imports take: forked from one that has imported everything and done nothing.

`python -m shared.rpc.forkserver MODULE...` imports these modules and then forks a process for every line on its
standard input, a socket: {"command": ["services.actor", "--replica", "actor-0"], "env": {}, "log": PATH, "name": NAME}.
It answers {"pid": PID}, and {"pid": PID, "code": CODE} when that one has ended. Each lives and dies on its own; only
when this server dies do all of its children end.
"""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.rpc.lifetime import PARENT_VARIABLE, tie_to_parent

_PR_SET_NAME = 15
_NICENESS = 5
"""Who computes gives way to Redis and to the controller, which have little to do and are waited for by all."""
_START_SECONDS = 120.0
_STOP_SECONDS = 5.0


class Forked:
    """A process that the server has forked; to be used as an asyncio.subprocess.Process.

    Attributes:
        returncode: None while it lives; -N when signal N ended it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it lives."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        """The server has told that it ended."""
        self.returncode = code
        self._ended.set()


class ForkServer:
    """Starts the server with the first process that is wanted, and again should it end.

    Args:
        modules: what it imports; what is not installed is left out.
        log: file for what it says itself.
        env: its environment. What libraries read of it when they are loaded (OMP_NUM_THREADS) holds for all processes.
    """

    def __init__(self, modules: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self._modules, self._log, self._env = modules, log, env
        self._lock = asyncio.Lock()
        self._server: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._ordered: deque[asyncio.Future[Forked]] = deque()
        self._children: dict[int, Forked] = {}

    async def spawn(self, command: Sequence[str], env: Mapping[str, str], log: Path, name: str) -> Forked:
        """A process that runs a module with arguments, as `python -m` does, in a session of its own.

        Args:
            env: its whole environment; it ends with the server, which ends with this process.
            log: its standard output and error are added to this file.
            name: what `ps -o comm` and `top` show, up to 15 characters.

        Raises:
            ConnectionError: the server ended instead; its log says why.
            TimeoutError: it has not answered in two minutes, imports included.
        """
        async with self._lock:
            if self._listener is None or self._listener.done():
                await self._start()
        assert self._writer is not None
        born: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._ordered.append(born)
        order = {"command": list(command), "env": dict(env), "log": str(log), "name": name}
        self._writer.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(_START_SECONDS):
            return await born

    async def close(self) -> None:
        """Ends the server, and with it all that it has forked."""
        if self._writer is None or self._server is None or self._listener is None:
            return
        self._writer.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._server.wait()
        except TimeoutError:
            self._server.kill()
            await self._server.wait()
        await self._listener

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as log:
            self._server = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "shared.rpc.forkserver", *self._modules,
                env={**self._env, PARENT_VARIABLE: str(os.getpid())}, stdin=theirs.fileno(), stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._listener = asyncio.create_task(self._listen(reader, self._writer))

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                told = json.loads(line)
                if "code" in told:
                    self._children.pop(told["pid"]).end(told["code"])
                else:
                    self._born(Forked(told["pid"]))
        writer.close()
        # The kernel has told them.
        while self._children:
            self._children.popitem()[1].end(-signal.SIGTERM)
        while self._ordered:
            if not (born := self._ordered.popleft()).done():
                born.set_exception(ConnectionError(f"the fork server ended: see {self._log}"))

    def _born(self, child: Forked) -> None:
        self._children[child.pid] = child
        if (born := self._ordered.popleft()).cancelled():
            # Nobody waits for it any more, and nobody would end it.
            child.kill()
        else:
            born.set_result(child)


def main() -> None:
    """Imports, and serves until the launcher is gone; in a forked process: becomes what was ordered."""
    tie_to_parent()
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    os.nice(_NICENESS)
    # What was imported is never collected: pages stay shared with the children.
    gc.freeze()
    server = os.getpid()
    with socket.socket(fileno=os.dup(0)) as orders:
        order = _serve(orders)
    if order:
        _become(order, server)


def _serve(orders: socket.socket) -> Any:
    """Forks at every order; returns None when there will be no more, and the order in the forked process."""
    wakes, wake = socket.socketpair()
    wake.setblocking(False)
    rest = b""
    with wakes, wake:
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            readable, _, _ = select.select([orders, wakes], [], [])
            if wakes in readable:
                wakes.recv(4096)
                for pid, status in _ended():
                    _tell(orders, pid=pid, code=os.waitstatus_to_exitcode(status))
            if orders not in readable:
                continue
            if not (received := orders.recv(1 << 16)):
                return None
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return json.loads(line)
                _tell(orders, pid=pid)


def _ended() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(ended)
    return found


def _tell(orders: socket.socket, **what: int) -> None:
    orders.sendall(json.dumps(what).encode() + b"\n")


def _become(order: Mapping[str, Any], server: int) -> None:
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    os.close(log)
    os.close(nothing)
    os.environ.clear()
    os.environ |= {**order["env"], PARENT_VARIABLE: str(server)}
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, order["name"].encode()[:15], 0, 0, 0)
    module, *flags = order["command"]
    sys.argv = [module, *flags]
    # Imported under its own name by the server, it is now to run.
    sys.modules.pop(f"{module}.__main__", None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
