"""One program on all ranks of a replica: rank 0 hears a command over gRPC and passes it on; all do the same, together.

Commands are the gRPC requests themselves, as protobuf bytes over a gloo group. A rank that dies, is late or fails where
others don't ends the whole group: half a group can only wait for the other half. Who waits for rank 0's answer is told
what the rank that failed alone said.
"""

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import structlog
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message

from shared.rpc.errors import GroupEnds
from shared.rpc.ranks import Handlers

from .group import Group

log = structlog.get_logger()
T = TypeVar("T")
EXIT_GROUP = 5
"""A rank of the group died, froze or failed alone."""
BEAT_SECONDS = 1.0
LOOK_SECONDS = 0.2
FAILED_ALONE_SECONDS = 15.0
"""How long a rank that failed waits for the others to fail, too."""
ANSWER_SECONDS = 5.0
"""How long rank 0 outlives its knowing that the group ends: so that whoever waits for it is told why."""
TOLD_SECONDS = 20.0
"""How long another rank that has told rank 0 so waits to be ended by it."""
_END = "end"


class Store(Protocol):
    """What is used of torch's TCPStore."""

    def set(self, key: str, value: str) -> object: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


class Watch(threading.Thread):
    """Ends this process when another rank has ended or gives no sign of life; says so on standard error.

    Args:
        timeout: seconds without a sign of life after which a rank counts as frozen.
        children: the other ranks' processes, where this one has started them, in order of rank.

    Attributes:
        end: on rank 0, why the group ends in a moment; "" while it does not.
    """

    def __init__(
        self, group: Group, store: Store, timeout: float, children: Sequence["subprocess.Popen[bytes]"] = ()
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._group, self._store, self._timeout, self._children = group, store, timeout, children
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._answered = time.monotonic()
        self.end = ""

    def run(self) -> None:
        # A store whose server is frozen answers never, and an exception comes from it never.
        threading.Thread(target=self._beat_on, name="beat", daemon=True).start()
        while True:
            for rank, child in enumerate(self._children, 1):
                if (code := child.poll()) is not None:
                    self.die(f"rank {rank} of {self._group.size} ended with exit code {code}")
            if time.monotonic() - self._answered > self._timeout + BEAT_SECONDS:
                self.die(f"rank 0 of {self._group.size} has not answered for {self._timeout:g} s")
            time.sleep(LOOK_SECONDS)

    def _beat_on(self) -> None:
        for number in itertools.count():
            try:
                self._beat(number)
            except Exception as error:  # noqa: BLE001 - whatever the store says, rank 0 is out of reach
                self.die(f"rank 0 can't be reached: {error}")
            self._answered = time.monotonic()
            time.sleep(BEAT_SECONDS)

    def _beat(self, number: int) -> None:
        self._store.set(f"beat/{self._group.rank}", str(number))
        if self._group.rank == 0 and self._store.check([_END]):
            self.leave(self._store.get(_END).decode())
        now = time.monotonic()
        for rank in range(1, self._group.size) if self._group.rank == 0 else (0,):
            beat = self._store.get(f"beat/{rank}") if self._store.check([f"beat/{rank}"]) else b""
            if self._seen.get(rank, (None, 0.0))[0] != beat:
                self._seen[rank] = beat, now
            elif beat and now - self._seen[rank][1] > self._timeout:
                self.die(f"rank {rank} of {self._group.size} has given no sign of life for {self._timeout:g} s")

    def leave(self, why: str) -> NoReturn:
        """Ends the group once rank 0 had the time to answer with the reason; not for when rank 0 is out of reach."""
        if self._group.rank == 0:
            self.end = why
            time.sleep(ANSWER_SECONDS)
        else:
            # Beside the group, in which rank 0 may wait for this rank for ever.
            self._store.set(_END, why)
            time.sleep(TOLD_SECONDS)
        self.die(why)

    def die(self, why: str) -> NoReturn:
        """Ends this process and those it has started, at once."""
        log.error("the group ends", rank=self._group.rank, why=why)
        print(f"rank {self._group.rank}: the group ends: {why}", file=sys.stderr, flush=True)
        for child in self._children:
            with contextlib.suppress(OSError):
                child.kill()
        os._exit(EXIT_GROUP)


class Spmd:
    """Commands to all ranks; see shared/rpc/ranks.py.

    Args:
        timeout: seconds by which ranks may come to the end of a command one after the other.
    """

    def __init__(self, group: Group, store: Store, watch: Watch, timeout: float) -> None:
        self._group, self._store, self._watch, self._timeout = group, store, watch, timeout
        self._number = 0
        self._one = asyncio.Lock()

    @property
    def end(self) -> str:
        return self._watch.end

    async def together(self, request: Message, work: Callable[[], Awaitable[T]]) -> T:
        # Operations of different lanes may come at the same time.
        async with self._one:
            return await self._unless_it_ends(self._command(request, work))

    async def _unless_it_ends(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work results in. In a group that ends it may wait for ever for a rank that failed."""
        task = asyncio.create_task(work)
        try:
            while not self.end:
                await asyncio.wait({task}, timeout=LOOK_SECONDS)
                if task.done():
                    return task.result()
            raise GroupEnds(self.end)
        finally:
            task.cancel()

    async def _command(self, request: Message, work: Callable[[], Awaitable[T]]) -> T:
        command = Packed()
        command.Pack(request)
        try:
            await asyncio.to_thread(self._group.broadcast, command.SerializeToString())
        except RuntimeError as error:
            # Whoever asks must not be told of it while this rank still looks alive.
            self._watch.die(f"{request.DESCRIPTOR.name} can't be passed on: {error}")
        return await self._to_the_end(request.DESCRIPTOR.name, work)

    async def follow(self, handlers: Handlers) -> NoReturn:
        """What ranks above 0 do all their life."""
        kinds = {kind.DESCRIPTOR.full_name: kind for kind in handlers}
        while True:
            command = Packed.FromString(await asyncio.to_thread(self._group.broadcast))
            kind = kinds[command.TypeName()]
            request: Any = kind.FromString(command.value)
            # All ranks raised the same, and rank 0 tells it to who asked.
            with contextlib.suppress(Exception):
                await self._to_the_end(kind.DESCRIPTOR.name, lambda: handlers[kind](request))  # noqa: B023

    async def _to_the_end(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await work()
        except Exception as error:
            await asyncio.to_thread(self._agree, name, f"{type(error).__name__}: {error}")
            raise
        await asyncio.to_thread(self._agree, name, "")
        return result

    def _agree(self, name: str, failure: str) -> None:
        """Waits until all ranks are done; ends the group unless all of them succeeded or failed in the same way."""
        self._number += 1
        mine = f"end/{self._number}/{self._group.rank}"
        self._store.set(mine, failure)
        until = time.monotonic() + (FAILED_ALONE_SECONDS if failure else self._timeout)
        for rank in range(self._group.size):
            other = self._outcome(f"end/{self._number}/{rank}", until)
            if other is None:
                said = f"rank {self._group.rank} failed: {failure}; " if failure else ""
                self._watch.leave(f"{said}rank {rank} did not come to the end of {name}")
            if _kind(other) != _kind(failure):
                self._watch.leave(
                    f"{name} failed on one rank and not on another: rank {rank}: {other or 'done'}; "
                    f"rank {self._group.rank}: {failure or 'done'}"
                )
        # Every rank is past the command before this one: nobody asks for its outcome any more.
        self._store.delete_key(f"end/{self._number - 1}/{self._group.rank}")

    def _outcome(self, key: str, until: float) -> str | None:
        pause = 0.001
        while not self._store.check([key]):
            if time.monotonic() > until:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return self._store.get(key).decode()


def _kind(failure: str) -> str:
    return failure.partition(":")[0]
