"""vLLM's sleep mode, for a rollout that shares its GPU with the actor: it has the memory only in turns of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's names of what sleeps."""
Answer = Callable[[Awaitable[Any]], Awaitable[Any]]


class Sleep:
    """Puts an engine to sleep at the end of its turn, before the last call for a step's rows ends: the actor is next.

    A turn begins with a committed version, or with such a call. The first row wakes the engine, and it stays awake,
    with rows or without: an agent that thinks about its next words costs no sleep. Rows that come when the turn is
    over (through the endpoint: nobody else asks then) wait for the next one, since the memory is the actor's.

    Asleep, the weights lie in main memory (vLLM's level 1, so that a version once verified stays what it is), and there
    are no keys and values. Both come back apart: the weights for a new version, the cache for the next rows.

    Args:
        engine: an AsyncLLM; None: it shares its GPU with nobody, and stays awake.
        answer: waits for what the engine answers, with a deadline.
    """

    def __init__(self, engine: Any, answer: Answer) -> None:
        self._engine: Any = engine
        self._answer = answer
        self._asleep: set[str] = set()
        self._turns = self._uses = 0
        self._ours, self._settled, self._turning = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        if engine is None:
            self._ours.set()

    @property
    def asleep(self) -> bool:
        """Whether anything is, or is about to be: such an engine makes no token."""
        return bool(self._asleep) or self._turning.locked()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The memory is the engine's meanwhile; at the end of the last one that overlaps it sleeps."""
        self._turns += 1
        self.begin()
        try:
            yield
        finally:
            self._turns -= 1
            if not self._turns:
                await self.end()

    def begin(self) -> None:
        """The memory is the engine's until the next `end`."""
        self._ours.set()
        self._note()

    async def end(self) -> None:
        """Puts the engine to sleep as soon as nobody uses it, unless another turn has begun by then."""
        if self._engine is None:
            return
        self._ours.clear()
        while not self._ours.is_set() and self._asleep != {WEIGHTS, CACHE}:
            self._note()
            await self._settled.wait()
            async with self._turning:
                if not self._uses and not self._ours.is_set():
                    # vLLM can't put to sleep what is half asleep.
                    await self._wake(*self._asleep)
                    await self._answer(self._engine.sleep(level=1))
                    self._asleep = {WEIGHTS, CACHE}

    def _note(self) -> None:
        """Tells `end` whether there is something to wait for."""
        if self._uses and not self._ours.is_set():
            self._settled.clear()
        else:
            self._settled.set()

    @contextlib.asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """All of it is awake meanwhile; waits for a turn."""
        while not self._ours.is_set():
            await self._ours.wait()
        with self.used():
            await self.wake(WEIGHTS, CACHE)
            yield

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """It is not put to sleep meanwhile."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            self._note()

    async def wake(self, *parts: str) -> None:
        """Brings parts back that are asleep, one after the other."""
        async with self._turning:
            await self._wake(*parts)

    async def _wake(self, *parts: str) -> None:
        for part in parts:
            if part in self._asleep:
                await self._answer(self._engine.wake_up(tags=[part]))
                self._asleep.discard(part)

    def over(self) -> None:
        """The engine is gone: nobody waits for it any more."""
        self._engine = None
        self._asleep.clear()
        self.begin()
