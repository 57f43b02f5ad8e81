"""The replicas of one role: who is there, who may be used for the run, and who is dead."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from services.controller.health import Health, Sign, sign_of
from services.controller.replica import Member, Phase, Refused, ReplicaLost, backoff
from services.controller.telemetry import HEALTH, REPLICAS
from shared.config import RecoveryConfig
from shared.routing import Speeds
from shared.rpc.client import Connections
from shared.rpc.errors import SextetError, Unavailable
from shared.state.registry import Replica

log = structlog.get_logger()


class RoleMissing(Unavailable):
    """Nobody plays a role that the run needs."""


Prepare = Callable[[Member], Awaitable[None]]


class Pool:
    """Members of a role. While a run is assigned, every new member is prepared for it before it is used."""

    def __init__(self, role: str, connections: Connections) -> None:
        self.role = role
        self._connections = connections
        self._members: dict[str, Member] = {}
        self._changed = asyncio.Condition()
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._probes: dict[Member, asyncio.Task[None]] = {}
        self._prepare: Prepare | None = None
        self._policy = RecoveryConfig()
        self._waiting = 0
        # One that was ready for the run was lost, and may come back.
        self._missed = False
        self.speeds = Speeds()

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    @property
    def awaited(self) -> bool:
        """Somebody waits for a member to come or to be ready."""
        return self._waiting > 0

    def ready(self) -> list[Member]:
        """Members that may be given work, the least loaded first."""
        return sorted(
            (member for member in self.members if member.usable), key=lambda member: (member.load, member.info.replica)
        )

    def health(self, replica: str) -> str:
        """A replica's health where it is not the best and a run is assigned; "" otherwise."""
        member = self._members.get(replica)
        if self._prepare is None or member is None or member.health is Health.HEALTHY:
            return ""
        return member.health.value

    async def wait(self, count: int, timeout: float) -> list[Member]:
        """At least `count` ready members. Who is loading is waited for up to `recovery.call_timeout`.

        Raises:
            RoleMissing: not enough within `timeout` seconds; says what to start.
            Refused: a replica refused the run's configuration and too few others are ready; once one that was ready
                has been lost, only after `timeout`, too.
        """

        def ended() -> bool:
            return len(self.ready()) >= count or bool(self._refused() and not self._missed)

        clock = asyncio.get_running_loop().time
        started = clock()
        while not await self._changes_to(ended, timeout):
            loading = any(member.phase is Phase.LOADING and not member.trouble for member in self.members)
            if not loading or clock() - started > self._policy.call_timeout:
                break
        if len(self.ready()) < count:
            refusal = next((member.refusal for member in self._refused()), None)
            raise refusal or RoleMissing(self._missing(count, clock() - started))
        return self.ready()

    async def named(self, replica: str, timeout: float) -> Member | None:
        """The replica with this id, once it is ready; None when it is not within `timeout` seconds."""

        def there() -> Member | None:
            return next((member for member in self.ready() if member.info.replica == replica), None)

        await self._changes_to(lambda: there() is not None, timeout)
        return there()

    async def _changes_to(self, condition: Callable[[], bool], timeout: float) -> bool:
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout), self._changed:
                return await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1

    def _refused(self) -> list[Member]:
        return [member for member in self.members if member.phase is Phase.REFUSED]

    def _missing(self, count: int, timeout: float) -> str:
        known = ", ".join(f"{member} {_standing(member)}" for member in self.members) or "none is registered"
        text = f"no {self.role} replica is ready after {timeout:.0f} s ({len(self.ready())} of {count}; {known})"
        if any(member.trouble for member in self.members):
            return text
        return (
            f"{text}: start one with `python -m services.{self.role}` or `sextet scale {self.role} {count}`, "
            "or see its log"
        )

    async def assign(self, prepare: Prepare, policy: RecoveryConfig) -> None:
        """From now on members are prepared with `prepare`; all that are there begin anew."""
        await self.unassign()
        self._prepare, self._policy, self._missed = prepare, policy, False
        for member in self.members:
            self._tend(member)

    async def unassign(self) -> None:
        """Nobody is usable any more."""
        self._prepare = None
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self.members:
            member.phase, member.refusal, member.trouble, member.load = Phase.NEW, None, "", 0
            member.health = Health.RESTARTING

    def tend(self, member: Member) -> None:
        """Has a member prepared again because its weights are old; it is not used until then."""
        member.note(Sign.OUTDATED)
        member.phase = Phase.NEW
        self._tend(member)

    async def observe(self, replicas: Sequence[Replica]) -> None:
        """Takes the registry's present view of this role."""
        seen = {replica.replica: replica for replica in replicas}
        for name, replica in seen.items():
            known = self._members.get(name)
            if known and known.identity != (replica.replica, replica.incarnation):
                await self.lose(known)
                known = None
            if known is None:
                self._members[name] = known = Member(replica, self._connections)
                self._tend(known)
            known.info, known.leased = replica, True
            self._heed(known)
        for member in self.members:
            if member.info.replica not in seen:
                member.leased = False
                if member not in self._probes:
                    self._probes[member] = asyncio.create_task(self._probe(member))
        await self._notify()

    def _heed(self, member: Member) -> None:
        """Takes a replica's own word on its engine; one that lost it is prepared again once it can be."""
        if sign := sign_of(member.info.state):
            member.note(sign)
        lost = member.health in (Health.DEAD, Health.RESTARTING)
        self._missed |= lost and member.phase is Phase.READY
        if lost and member.phase is Phase.READY and member.info.state != "dead":
            member.phase, member.weights = Phase.NEW, ""
            member.note(Sign.BACK)
            self._tend(member)

    async def _probe(self, member: Member) -> None:
        """A store that was emptied must not look like a dead pool: a replica without a lease that answers is alive."""
        try:
            if await member.dead():
                await self.lose(member)
        finally:
            self._probes.pop(member, None)

    async def lose(self, member: Member) -> None:
        """Drops a dead member: its running calls end with ReplicaLost."""
        member.note(Sign.LOST)
        self._missed |= member.phase is Phase.READY
        self.speeds.forget(member.info.replica)
        member.gone.set()
        if task := self._tasks.pop(member, None):
            task.cancel()
        if self._members.get(member.info.replica) is member:
            del self._members[member.info.replica]
            # A process that comes back on the same port is found at once by a new channel.
            await self._connections.drop(member.info.endpoint)
            log.warning("replica lost", member=str(member))
        await self._notify()

    async def close(self) -> None:
        """Ends all that is done in the background."""
        await self.unassign()
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    def _tend(self, member: Member) -> None:
        if self._prepare is None:
            return
        if running := self._tasks.get(member):
            running.cancel()
        self._tasks[member] = asyncio.create_task(self._bring_up(member, self._prepare))

    async def _bring_up(self, member: Member, prepare: Prepare) -> None:
        """Prepares a member, again after failures that may pass, until it is ready, refuses, or is gone."""
        failures = 0
        while not member.gone.is_set():
            try:
                await prepare(member)
            except ReplicaLost:
                # Its lease may live on for some seconds; the registry will show what is true.
                await asyncio.sleep(backoff(self._policy, 1))
            except Refused as error:
                member.phase, member.refusal = Phase.REFUSED, error
                log.warning("replica refused", member=str(member), error=str(error))
                await self._notify()
                return
            except SextetError as error:
                failures += 1
                # Not loading any more: who waits for it waits no longer than for one that is missing.
                member.phase, member.trouble = Phase.NEW, str(error)
                log.warning("preparing a replica failed", member=str(member), error=str(error))
                await asyncio.sleep(backoff(self._policy, failures))
            except Exception:
                log.exception("preparing a replica failed for good", member=str(member))
                return
            else:
                member.phase, member.trouble = Phase.READY, ""
                member.note(Sign.LOADED, Sign.CURRENT)
                await self._notify()
                return

    async def _notify(self) -> None:
        for phase in Phase:
            count = sum(member.phase is phase for member in self.members)
            REPLICAS.labels(self.role, phase.value).set(count)
        for health in Health:
            HEALTH.labels(self.role, health.value).set(sum(member.health is health for member in self.members))
        async with self._changed:
            self._changed.notify_all()


def _standing(member: Member) -> str:
    return f"cannot be prepared: {member.trouble}" if member.trouble else f"is {member.info.state}"
