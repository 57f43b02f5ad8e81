"""vLLM's sleep mode, for a rollout that shares its GPU with the actor: it has the memory only while it samples."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's names of what sleeps."""
Answer = Callable[[Awaitable[Any]], Awaitable[Any]]


class Sleep:
    """Puts an engine to sleep whenever no call samples, before the last such call ends: then the actor may take over.

    Asleep, the weights lie in main memory (vLLM's level 1, so that a version once verified stays what it is), and there
    are no keys and values. Both come back apart: the weights for a new version, the cache for the next rows.

    Args:
        engine: an AsyncLLM; None: it shares its GPU with nobody, and stays awake.
        answer: waits for what the engine answers, with a deadline.
    """

    def __init__(self, engine: Any, answer: Answer) -> None:
        self._engine, self._answer = engine, answer
        self._asleep: set[str] = set()
        self._calls = 0
        self._turning = asyncio.Lock()

    @property
    def asleep(self) -> bool:
        """Whether anything is: such an engine makes no token."""
        return bool(self._asleep)

    @contextlib.asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """All of it is awake meanwhile."""
        self._calls += 1
        try:
            await self.wake(WEIGHTS, CACHE)
            yield
        finally:
            self._calls -= 1
            await self.rest()

    async def wake(self, *parts: str) -> None:
        """Brings parts back that are asleep, one after the other."""
        async with self._turning:
            for part in parts:
                if part in self._asleep:
                    await self._answer(self._engine.wake_up(tags=[part]))
                    self._asleep.discard(part)

    async def rest(self) -> None:
        """Puts the engine to sleep if nobody samples."""
        async with self._turning:
            # vLLM can't put to sleep what is half asleep: calls that sample wake all of it.
            if self._engine is not None and not self._calls and not self._asleep:
                await self._answer(self._engine.sleep(level=1))
                self._asleep = {WEIGHTS, CACHE}
