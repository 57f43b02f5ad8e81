"""Who is there: every replica registers itself under a lease and renews it while it lives."""

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, fields

import structlog

from shared.rpc.errors import FailedPrecondition, SextetError
from shared.state import lease
from shared.state.store import StateStore

log = structlog.get_logger()

_REPLICAS = "sextet:replicas:"
_LEASES = "sextet:leases:"


@dataclass(frozen=True)
class ReplicaState:
    """What a service says of itself.

    Attributes:
        run: the run it is configured for; "" when none.
        version: optimizer step of its weights; -1 when it holds none.
        running: operations running.
        fault: why it can't serve; "" when it can.
        facts: further facts for people (device, engine, ...).
        standing: "dead" or "restarting" when its engine is; "" otherwise.
    """

    run: str = ""
    version: int = -1
    running: int = 0
    fault: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    standing: str = ""


@dataclass(frozen=True)
class Replica:
    """A registered replica.

    `state` is ready, busy, draining, suspect, dead or restarting; `incarnation` changes with every start.
    """

    role: str
    replica: str
    endpoint: str
    incarnation: str
    state: str
    run: str
    version: int
    running: int
    facts: dict[str, str]
    fault: str = ""


async def list_replicas(store: StateStore, role: str | None = None) -> list[Replica]:
    """All live replicas, or those of one role, by role and replica id."""
    found = await store.scan(f"{_REPLICAS}{role}:" if role else _REPLICAS)
    return [replica for key in sorted(found) if (replica := _replica(key, found[key]))]


def _replica(key: str, value: bytes) -> Replica | None:
    """The entry; one that this version can't read (a newer one may have other fields) is left out."""
    names = {item.name for item in fields(Replica)}
    try:
        return Replica(**{name: given for name, given in json.loads(value).items() if name in names})
    except (ValueError, TypeError, AttributeError) as error:
        log.warning("registry entry can't be read", key=key, error=str(error))
        return None


class Registration:
    """A replica's entry: written on start, renewed every ttl/3, removed on stop.

    Redis may go away and come back: renewing keeps trying and registers anew. When another process holds the same
    replica id, `lost` is set and this one must stop.

    Args:
        describe: asked at every renewal.
        ttl: seconds after which a silent replica is gone.
    """

    def __init__(
        self,
        store: StateStore,
        role: str,
        replica: str,
        endpoint: str,
        incarnation: str,
        describe: Callable[[], ReplicaState],
        ttl: float,
        facts: Mapping[str, str],
    ) -> None:
        self._store, self._describe, self._ttl = store, describe, ttl
        self._role, self._replica, self._endpoint, self._incarnation = role, replica, endpoint, incarnation
        self._facts = {"host": socket.gethostname(), "pid": str(os.getpid()), **facts}
        if gpus := os.environ.get("CUDA_VISIBLE_DEVICES"):
            # cuda:0 is the first of these.
            self._facts["gpus"] = gpus
        self._key, self._lease = f"{_REPLICAS}{role}:{replica}", f"{_LEASES}{role}:{replica}"
        self._owner = lease.owner(incarnation)
        self._draining = False
        self._task: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()

    async def start(self) -> None:
        """Registers; waits up to one ttl for the lease of a predecessor that was killed on another machine to expire.

        Raises:
            FailedPrecondition: another live process has this replica id.
            Unavailable: the store can't be reached.
        """
        until = asyncio.get_running_loop().time() + self._ttl + 1
        while not await lease.take(self._store, self._lease, self._owner, self._ttl):
            if asyncio.get_running_loop().time() > until:
                raise FailedPrecondition(
                    f"replica id {self._replica!r} of role {self._role} is in use by a live process: "
                    "stop that one or choose another id with --replica"
                )
            await asyncio.sleep(self._ttl / 10)
        await self._write()
        self._task = asyncio.create_task(self._renew_for_ever())

    async def drain(self) -> None:
        """Tells everybody not to send new work."""
        self._draining = True
        await self._try(self._write())

    async def tell(self) -> None:
        """Writes the entry now, since something changed."""
        await self._try(self._renew())

    async def stop(self) -> None:
        """Removes the entry, if it is still ours."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if not self.lost.is_set():
            await self._try(self._remove())

    async def _remove(self) -> None:
        await self._store.delete(self._key)
        await self._store.release(self._lease, self._owner)

    async def _renew_for_ever(self) -> None:
        while not self.lost.is_set():
            await asyncio.sleep(self._ttl / 3)
            await self._try(self._renew())

    async def _renew(self) -> None:
        # After an outage of Redis the lease is gone, and taking it anew is registering again.
        if await self._store.acquire(self._lease, self._owner, self._ttl):
            await self._write()
        else:
            log.error("replica id taken over by another process", role=self._role, replica=self._replica)
            self.lost.set()

    async def _write(self) -> None:
        await self._store.put(self._key, json.dumps(asdict(self._entry())).encode(), self._ttl)

    async def _try(self, action: Awaitable[None]) -> None:
        try:
            await action
        except SextetError as error:
            log.warning("registration not renewed", error=str(error), role=self._role, replica=self._replica)

    def _entry(self) -> Replica:
        now = self._describe()
        working = "suspect" if now.fault else "busy" if now.running else "ready"
        state = "draining" if self._draining else now.standing or working
        return Replica(
            role=self._role,
            replica=self._replica,
            endpoint=self._endpoint,
            incarnation=self._incarnation,
            state=state,
            run=now.run,
            version=now.version,
            running=now.running,
            facts={**self._facts, **now.facts},
            fault=now.fault,
        )
