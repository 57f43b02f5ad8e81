"""One replica of a role as the controller sees it, and how an operation is brought to its end on it."""

import asyncio
from collections.abc import Coroutine
from enum import Enum
from typing import Any

import structlog

from services.controller.detour import Detour
from services.controller.health import Health, Sign, advance
from services.controller.telemetry import RECEIVED, RETRIES
from services.controller.verbs import Verb
from shared.config import RecoveryConfig
from shared.failpoints import hit_async
from shared.gen.sextet.v1 import role_pb2, role_pb2_grpc
from shared.rpc.client import Connections, call
from shared.rpc.errors import Cancelled, DeadlineExceeded, GroupEnds, SextetError
from shared.state.registry import Replica

log = structlog.get_logger()

ATTEMPT_SECONDS = 30.0
PROBE_SECONDS = 3.0
BACKOFF_SECONDS = 0.2


class Phase(Enum):
    """How far the pool has brought a replica."""

    NEW = "new"
    LOADING = "loading"
    READY = "ready"
    REFUSED = "refused"


class ReplicaLost(Exception):
    """The replica is dead, or was restarted and has forgotten."""

    def __init__(self, member: "Member") -> None:
        super().__init__(f"{member} was lost{member.said}")
        self.member = member


class Refused(Exception):
    """A replica answered that it can't do this run; trying again will not help. `cause` is its answer."""

    def __init__(self, member: "Member", cause: SextetError) -> None:
        super().__init__(f"{member}: {cause}")
        self.cause = cause


class Member:
    """A replica from one process start to its end; a restarted one is another Member."""

    def __init__(self, info: Replica, connections: Connections) -> None:
        self.info = info
        self.phase = Phase.NEW
        self.health = Health.RESTARTING
        self.leased = True
        self.weights = ""
        """Digest of the weights it is known to serve; "initial" for those of the model as configured."""
        self.detour: Detour | None = None
        self.refusal: Refused | None = None
        self.trouble = ""
        self.last_words = ""
        self.load = 0
        self.gone = asyncio.Event()
        self._connections = connections

    def __str__(self) -> str:
        return f"{self.info.role} {self.info.replica} ({self.info.endpoint})"

    @property
    def said(self) -> str:
        """What it said when it ended, to be put after a sentence that tells of its end; "" if nothing."""
        return f" (it ended with: {self.last_words})" if self.last_words else ""

    @property
    def identity(self) -> tuple[str, str]:
        return self.info.replica, self.info.incarnation

    @property
    def usable(self) -> bool:
        """It takes new work: ready for the run, not about to leave, and healthy."""
        return self.phase is Phase.READY and self.health is Health.HEALTHY and self.info.state in ("ready", "busy")

    def note(self, *signs: Sign) -> None:
        """Takes in what was seen of it, in this order."""
        before = self.health
        for sign in signs:
            self.health = advance(self.health, sign)
        if self.health is not before:
            log.info("replica health", member=str(self), before=before.value, health=self.health.value)

    @property
    def channel(self) -> Any:
        return self._connections.channel(self.info.endpoint)

    async def describe(self) -> role_pb2.DescribeResponse:
        """Asks the replica where it stands; raises ReplicaLost when another process answers."""
        method = role_pb2_grpc.RoleServiceStub(self.channel).Describe
        answer = await call(method, role_pb2.DescribeRequest(), timeout=PROBE_SECONDS)
        if answer.incarnation != self.info.incarnation:
            raise ReplicaLost(self)
        return answer

    async def trouble_with(self, run: str) -> str:
        """Why it can't do a run's work although it did before; "" when it could.

        Raises:
            ReplicaLost: another process has taken its place.
        """
        try:
            standing = await self.describe()
        except SextetError as error:
            return f"does not say where it stands: {error}"
        if standing.fault:
            return f"has a fault: {standing.fault}"
        return "" if standing.run == run else "does not hold the run any more"

    async def dead(self) -> bool:
        """Whether the process is gone; one that only does not answer is dead when its lease is gone too."""
        if self.gone.is_set():
            return True
        try:
            await self.describe()
        except DeadlineExceeded:
            return not self.leased
        except (SextetError, ReplicaLost):
            return True
        return False


async def operate(member: Member, verb: Verb, request: Any, policy: RecoveryConfig) -> Any:
    """Calls until the operation has ended; every attempt carries the same id, so that it attaches and never repeats.

    Raises:
        ReplicaLost: the replica died.
        DeadlineExceeded: the operation took longer than `recovery.call_timeout`.
        SextetError: what the replica answered, after `recovery.max_retries` retries where those can help.
    """
    clock = asyncio.get_running_loop().time
    end, failures = clock() + policy.call_timeout, 0
    while (left := end - clock()) > 0:
        timeout, started = min(ATTEMPT_SECONDS, left), clock()
        await hit_async(f"controller.before_{verb.name}")
        try:
            response = await _unless_gone(member, call(verb.on(member.channel), request, timeout=timeout))
        except SextetError as error:
            if isinstance(error, GroupEnds):
                member.last_words = str(error)
            if isinstance(error, Cancelled | GroupEnds) or (error.retryable and await member.dead()):
                raise ReplicaLost(member) from error
            if not error.retryable:
                raise
            # An attempt that used up its time says nothing about the operation: attach to it again.
            if isinstance(error, DeadlineExceeded) and clock() - started > 0.9 * timeout:
                continue
            failures += 1
            if failures > policy.max_retries or not member.usable:
                raise
            RETRIES.labels(verb.name).inc()
            await asyncio.sleep(backoff(policy, failures))
        else:
            await hit_async(f"controller.after_{verb.name}")
            RECEIVED.labels(verb.name).inc(response.ByteSize())
            return response
    raise DeadlineExceeded(f"{verb.name} on {member} did not end within recovery.call_timeout={policy.call_timeout} s")


def backoff(policy: RecoveryConfig, failures: int) -> float:
    """Seconds to wait before the next attempt after `failures` of them."""
    return min(BACKOFF_SECONDS * policy.backoff**failures, ATTEMPT_SECONDS)


async def _unless_gone(member: Member, attempt: Coroutine[Any, Any, Any]) -> Any:
    """The attempt's outcome, or ReplicaLost as soon as the replica is known to be dead."""
    ended, response = await until_first(attempt, member.gone.wait())
    if not ended:
        raise ReplicaLost(member)
    return response


async def until_first(work: Coroutine[Any, Any, Any], end: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Whether `work` ended before `end` did, and its result; the other one is cancelled."""
    working, ending = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        return (True, working.result()) if working.done() else (False, None)
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)
