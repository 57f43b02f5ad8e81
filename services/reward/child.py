"""The service's side of a grader process: start, ask, kill."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

START_SECONDS = 60.0
MAX_ANSWER_BYTES = 4 << 20
STDERR_TAIL = 2000

log = structlog.get_logger()


class CannotStart(Exception):
    """A grader process did not become ready; the text says why."""


class NotJson(Exception):
    """A message that can't be sent; nothing of it was."""


class GraderProcess:
    """One `services.reward.grader`, started when needed and killed with all it started when it fails or overruns.

    Plain `Popen` and a socket pair: asyncio's own subprocesses wait for every holder of their pipes, and a process
    that user code left behind may hold them for ever.
    """

    def __init__(self, function: str, kwargs: Mapping[str, Any], memory_bytes: int) -> None:
        self._setup = {"function": function, "kwargs": kwargs, "memory_bytes": memory_bytes, "seconds": START_SECONDS}
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._output: asyncio.Task[None] | None = None
        self._tail = b""
        self._ids = itertools.count()
        self._lock = asyncio.Lock()

    async def start(self) -> str:
        """Starts the process; returns the function's signature, "verl" or "trl". Raises CannotStart."""
        function = f"reward.function={self._setup['function']!r}"
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._spawn()
                answer = await self._exchange(self._setup)
        except TimeoutError:
            await self.stop()
            raise CannotStart(f"{function}: its import takes more than {START_SECONDS:g} s") from None
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise CannotStart(f"{function}: while it was imported {await self._obituary()}") from None
        except BaseException:
            await self.stop()
            raise
        if "signature" not in answer:
            await self.stop()
            raise CannotStart(str(answer.get("error")))
        return str(answer["signature"])

    async def ask(self, items: Sequence[Mapping[str, Any]], timeout: float) -> dict[str, Any]:
        """The process's answer, `{"results"}` or `{"kind", "error"}`; whatever user code does, it raises nothing."""
        async with self._lock:
            try:
                if self._process is None:
                    await self.start()
                async with asyncio.timeout(timeout):
                    return await self._exchange({"id": next(self._ids), "seconds": timeout, "items": items})
            except CannotStart as error:
                return {"kind": "exited", "error": str(error)}
            except NotJson as error:
                return {"kind": "rejected", "error": f"prompt or extra_info: {error}"}
            except TimeoutError:
                await self.stop()
                return {"kind": "timeout", "error": f"no answer within reward.timeout={timeout:g} s"}
            except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                return {"kind": "exited", "error": await self._obituary()}
            except BaseException:
                # Cancelled in mid-request: the answer still to come would be taken for the next one's.
                await self.stop()
                raise

    async def stop(self) -> None:
        """Kills the process group. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if self._streams is not None:
            self._streams[1].transport.abort()
        if self._output is not None:
            self._output.cancel()
            await asyncio.gather(self._output, return_exceptions=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 5)

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _launch(theirs)
        self._tail = b""
        self._output = asyncio.create_task(self._read_output(self._process))
        self._streams = await asyncio.open_unix_connection(sock=ours, limit=MAX_ANSWER_BYTES)

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(_line(message))
        await writer.drain()
        answer = json.loads(await reader.readuntil(b"\n"))
        if not isinstance(answer, dict) or answer.get("id") != message.get("id"):
            raise ValueError("an answer to another request")
        return answer

    async def _read_output(self, process: subprocess.Popen[bytes]) -> None:
        """Keeps user code's prints flowing: a full pipe would stop it. The last ones explain its death."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stderr)
        try:
            while chunk := await reader.read(1 << 16):
                self._tail = (self._tail + chunk)[-STDERR_TAIL:]
                log.debug("reward function output", bytes=len(chunk), text=chunk[:200].decode(errors="replace"))
        finally:
            transport.close()

    async def _obituary(self) -> str:
        """Ends a process that died or lost the protocol; returns what is known about why."""
        process, output = self._process, self._output
        if output is not None:
            await asyncio.wait([output], timeout=0.2)  # its last words may still be in the pipe
        await self.stop()
        code = process.returncode if process is not None else None
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        last = self._tail.decode(errors="replace").strip().splitlines()[-1:]
        return f"the grader process ended with {how}" + (f": {last[0][:300]}" if last else "")


def _line(message: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(message).encode() + b"\n"
    except RecursionError:
        # What was just parsed may be nested too deeply to be written again.
        raise NotJson("nested too deeply") from None


def _launch(line: socket.socket) -> subprocess.Popen[bytes]:
    # The cluster's token is none of user code's business.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SEXTET_")}
    return subprocess.Popen(
        (sys.executable, "-m", "services.reward.grader"),
        stdin=line.fileno(),
        stdout=line.fileno(),
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
