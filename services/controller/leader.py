"""Which of several controllers leads. The lease avoids contention; what makes it safe is the epoch (law 3)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from services.controller.telemetry import LEADS
from shared.rpc.errors import SextetError
from shared.state import StateStore, lease

log = structlog.get_logger()
KEY = "sextet:leader"
LEASE_SECONDS = 2.0


class Leadership:
    """A lease on leading, taken as soon as it is free and kept until another has it.

    A store that is away changes nothing: nobody else can take the lease there, and roles refuse who is too old.

    Args:
        owner: see `lease.owner`.

    Attributes:
        gained, lost: one of them is set.
    """

    def __init__(self, store: StateStore, owner: str, ttl: float = LEASE_SECONDS) -> None:
        self._store, self._owner, self._ttl = store, owner, ttl
        self.gained, self.lost = asyncio.Event(), asyncio.Event()
        self.lost.set()

    @property
    def leads(self) -> bool:
        return self.gained.is_set()

    @contextlib.asynccontextmanager
    async def sought(self) -> AsyncIterator[None]:
        """Seeks and keeps the lease meanwhile; gives it back at the end."""
        task = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with contextlib.suppress(SextetError):
                await self._store.release(KEY, self._owner)

    async def confirm(self) -> bool:
        """Whether this controller still leads, asked of the store: before something is written that others read."""
        if self.leads:
            with contextlib.suppress(SextetError):
                self._set(await self._store.acquire(KEY, self._owner, self._ttl))
        return self.leads

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(SextetError):
                self._set(await lease.take(self._store, KEY, self._owner, self._ttl))
            await asyncio.sleep(self._ttl / 3)

    def _set(self, leads: bool) -> None:
        if leads == self.leads:
            return
        log.info("leadership", leads=leads)
        LEADS.set(leads)
        (self.gained if leads else self.lost).set()
        (self.lost if leads else self.gained).clear()
