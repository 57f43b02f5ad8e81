"""All roles together: the watch on the registry, and what is done with replicas for the run that uses them."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from services.controller import verbs
from services.controller.detour import after_failure
from services.controller.health import Sign
from services.controller.operation import identify
from services.controller.pool import Pool, RoleMissing
from services.controller.replica import Member, Phase, Refused, ReplicaLost, operate
from services.controller.telemetry import DETOURS, WIRE_FAILURES
from shared.config import RunConfig
from shared.failpoints import hit_async
from shared.gen.sextet.v1 import role_pb2, role_pb2_grpc, rollout_pb2, weights_pb2
from shared.rpc.client import Connections, call
from shared.rpc.errors import FailedPrecondition, InvalidArgument, NotFound, SextetError, Unavailable, Unimplemented
from shared.state import StateStore
from shared.state.registry import Replica, list_replicas

log = structlog.get_logger()
T = TypeVar("T")

REFRESH_SECONDS, AWAITED_SECONDS = 0.5, 0.1
REFRESH_TIMEOUT = 5.0
RELEASE_SECONDS = 5.0
INITIAL = "initial"
REFUSALS = (InvalidArgument, NotFound, FailedPrecondition, Unimplemented)


class StateLost(Exception):
    """A role that learns was restarted: the run must go back to what is saved."""


@dataclass
class Session:
    """A run's hold on the cluster from one beginning, or one rollback, to the next.

    Attributes:
        epoch: the fencing epoch that goes with every operation.
        take: how often the run was rolled back.
        step: the step being played.
        weights: what rollouts must serve; None: the model as configured.
        kept: the process that holds actor's and critic's state.
        versions: optimizer steps of the roles that learn, after what was done in this step so far.
        facts: what a role said about itself when it was configured.
        attached: it goes on where roles are, so that a rollout's own word on its version can be taken.
        ahead: the policy may have been updated in the step that is taken up, and rollouts may serve the new weights.
        settled: set once `weights` is known; rollouts load models before that and wait.
    """

    run: str
    config: RunConfig
    config_json: str
    roles: frozenset[str]
    epoch: int
    take: int
    step: int = 0
    weights: weights_pb2.WeightsRef | None = None
    kept: dict[str, Member] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    attached: bool = False
    ahead: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def identify(self, request: Any, verb: verbs.Verb, mark: str = "") -> Any:
        """The request as an operation of this session's present step."""
        return identify(request, verb, run=self.run, step=self.step, epoch=self.epoch, take=self.take, mark=mark)

    @property
    def weights_digest(self) -> str:
        return self.weights.digest if self.weights else INITIAL


class Cluster:
    """The pools of all roles.

    Args:
        store: global state, with the registry.
        connections: channels to roles; closed by its maker.
    """

    def __init__(self, store: StateStore, connections: Connections) -> None:
        self._store = store
        self._connections = connections
        self.pools = {role: Pool(role, connections) for role in verbs.ROLES}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Keeps the pools up to date meanwhile."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for pool in self.pools.values():
                await pool.close()

    async def _watch(self) -> None:
        while True:
            try:
                async with asyncio.timeout(REFRESH_TIMEOUT):
                    await self.refresh()
            except Exception as error:  # noqa: BLE001  (whatever the store says: the pools keep what they know)
                log.warning("the registry cannot be read", error=str(error) or type(error).__name__)
            until = asyncio.get_running_loop().time() + REFRESH_SECONDS
            while (left := until - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(min(AWAITED_SECONDS, left))
                if any(pool.awaited for pool in self.pools.values()):
                    break

    async def refresh(self) -> None:
        """Reads the registry once."""
        replicas = await list_replicas(self._store, None)
        for role, pool in self.pools.items():
            await pool.observe([replica for replica in replicas if replica.role == role])

    def health(self, replica: Replica) -> str:
        """What keeps a replica from the work of the run that plays: suspect, dead, restarting, stale; "" nothing."""
        return self.pools[replica.role].health(replica.replica) if replica.role in self.pools else ""

    def detour(self, replica: Replica) -> str:
        """Why a rollout's weights go by gRPC though they could go by a wire; "" if they do not."""
        members = self.pools[replica.role].members if replica.role in self.pools else []
        found = [member.detour for member in members if member.info.replica == replica.replica and member.detour]
        return found[0].describe() if found else ""

    async def assign(self, session: Session) -> None:
        """Prepares the spread roles of a session; those that learn only need to answer."""
        for role in session.roles:
            await self.pools[role].assign(lambda member: self._prepare(member, session), session.config.recovery)

    async def unassign(self) -> None:
        """Ends the session's hold."""
        for pool in self.pools.values():
            await pool.unassign()

    async def _prepare(self, member: Member, session: Session) -> None:
        standing = await member.describe()
        if member.info.role in verbs.KEPT:
            return
        member.phase = Phase.LOADING
        # An attempt to set the run up that failed may have configured it, and took with it what the role had said.
        if standing.run != session.run or member.info.role not in session.facts:
            await self.configure(member, session)
        if member.info.role != "rollout":
            return
        await session.settled.wait()
        serves = session.weights.version if session.weights else 0
        if session.attached and standing.run == session.run:
            # Ahead, it still answers what it did before the update, and the step's own sync follows. Brought back, it
            # would answer that sync from memory and serve the old weights on.
            ahead = session.ahead and standing.version > serves
            if ahead or (standing.version == serves and not member.weights):
                member.weights = session.weights_digest
        elif standing.run == session.run and standing.version != serves:
            # It may have been ahead of a step that was taken up, and counted among those that served its weights.
            member.weights = ""
        # The target moves on while a slow replica is fetching.
        while member.weights != session.weights_digest:
            await self._bring_weights(member, session)

    async def configure(self, member: Member, session: Session, checkpoint: str = "") -> int:
        """Makes a replica load the run; returns its weight version.

        Raises:
            Refused: the configuration or the checkpoint can't be used.
        """
        verb = verbs.configure(member.info.role)
        request = role_pb2.ConfigureRequest(config_json=session.config_json, checkpoint=checkpoint)
        try:
            answer = await operate(member, verb, session.identify(request, verb), session.config.recovery)
        except REFUSALS as error:
            raise Refused(member, error) from error
        member.note(Sign.LOADED)
        session.facts[member.info.role] = dict(answer.facts)
        if member.info.role == "rollout":
            member.weights = INITIAL
        return answer.version

    async def _bring_weights(
        self, member: Member, session: Session, gathering: weights_pb2.WeightsGathering | None = None
    ) -> int:
        """Prepare, then commit, the session's weights on one rollout replica: with the gathering, or alone.

        Returns:
            Bytes that travelled.
        """
        weights = session.weights
        if weights is None:
            # It served trained weights of this run, and the run is back at the start.
            await self.configure(member, session)
            return 0
        source = weights_pb2.WeightsRef()
        source.CopyFrom(weights)
        peers = [
            peer for peer in self.pools["rollout"].ready() if peer.weights == weights.digest and peer is not member
        ]
        source.endpoints.extend(sorted(peer.info.endpoint for peer in peers))
        request = rollout_pb2.PrepareWeightsRequest(weights=source, gathering=gathering)
        policy = session.config.recovery
        try:
            prepared = await operate(
                member, verbs.PREPARE_WEIGHTS, session.identify(request, verbs.PREPARE_WEIGHTS), policy
            )
        except SextetError as error:
            if gathering is None:
                raise
            maker, cause = weights.endpoints[0], str(error)
            member.detour = after_failure(member.detour, maker, cause)
            WIRE_FAILURES.labels(member.info.replica).inc()
            log.warning("weights not taken together, but alone", member=str(member), error=member.detour.describe())
            return await self._bring_weights(member, session)
        if gathering is not None:
            member.detour = None
        await hit_async("controller.before_commit_weights")
        commit = rollout_pb2.CommitWeightsRequest(version=prepared.version, digest=prepared.digest)
        await operate(member, verbs.COMMIT_WEIGHTS, session.identify(commit, verbs.COMMIT_WEIGHTS), policy)
        member.weights = weights.digest
        return prepared.received_bytes

    async def sync(self, session: Session, weights: weights_pb2.WeightsRef) -> int:
        """Brings new weights to all rollouts, when all that were ready serve them or have left.

        Returns:
            Bytes that the rollouts received.

        Raises:
            StateLost: the actor was lost before anybody had them.
            RoleMissing: no rollout serves them in time.
        """
        await hit_async("controller.before_sync")
        received = await self.unless_lost(session, self._sync(session, weights))
        await hit_async("controller.after_sync")
        return received

    async def _sync(self, session: Session, weights: weights_pb2.WeightsRef) -> int:
        session.weights = weights
        pool = self.pools["rollout"]
        behind = [member for member in pool.members if member.phase is Phase.READY and member.weights != weights.digest]
        members = [member for member in behind if member.usable]
        for member in set(behind) - set(members):
            # It will answer again one day, and must not serve what it holds then.
            pool.tend(member)
        together = [member for member in members if weights.offers and not _detours(member, weights)]
        gathering = _gathering(together) if together else None
        outcomes = await asyncio.gather(
            *(self._bring_weights(member, session, gathering if member in together else None) for member in members),
            return_exceptions=True,
        )
        DETOURS.set(sum(member.detour is not None for member in pool.members))
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, ReplicaLost):
                await pool.lose(member)
            elif isinstance(outcome, Exception):
                log.warning("weights not taken", member=str(member), error=str(outcome))
                pool.tend(member)
        await pool.wait(1, session.config.recovery.replica_timeout)
        return sum(outcome for outcome in outcomes if isinstance(outcome, int))

    async def unless_lost(self, session: Session, work: Coroutine[Any, Any, T]) -> T:
        """What the work results in. Work that waits for state which nobody has any more would wait for ever.

        Raises:
            StateLost, Unavailable: as `hold`, for a role whose process is known to have ended meanwhile.
        """
        task = asyncio.create_task(work)
        try:
            while True:
                ends = [asyncio.create_task(member.gone.wait()) for member in session.kept.values()]
                try:
                    await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for end in ends:
                        end.cancel()
                if task.done():
                    return task.result()
                for role in session.kept:
                    await self.hold(session, role)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def hold(self, session: Session, role: str) -> Member:
        """The process that holds the session's state of a role that learns; waits while it is not reachable.

        Raises:
            StateLost: another process has taken its place.
            Unavailable: nobody has within `recovery.replica_timeout`.
        """
        known = session.kept[role]
        if not known.gone.is_set():
            return known
        try:
            member = (await self.pools[role].wait(1, session.config.recovery.replica_timeout))[0]
        except RoleMissing as error:
            raise RoleMissing(f"{error}{known.said}") from error
        if member.identity != known.identity:
            raise StateLost(f"{role} was restarted{known.said}: {member} does not hold the run's state")
        session.kept[role] = member
        return member

    async def release(self, session: Session, step: int, saved_step: int) -> None:
        """Frees what steps up to `step` left on all roles. Best effort: a role that misses it is told at the next.

        Args:
            saved_step: the run goes back to this step at most.
        """
        request = role_pb2.ReleaseStepRequest(
            run=session.run, epoch=session.epoch, step=step, saved_step=min(saved_step, step)
        )
        await self._tell_all(session.roles, "ReleaseStep", request)

    async def release_run(self, run: str, epoch: int, roles: Iterable[str]) -> None:
        """Ends a run's use of all roles. Best effort."""
        await self._tell_all(roles, "ReleaseRun", role_pb2.ReleaseRunRequest(run=run, epoch=epoch))

    async def _tell_all(self, roles: Iterable[str], method: str, request: Any) -> None:
        members = [member for role in roles for member in self.pools[role].members]
        sends = [
            call(getattr(role_pb2_grpc.RoleServiceStub(member.channel), method), request, timeout=RELEASE_SECONDS)
            for member in members
        ]
        for member, outcome in zip(members, await asyncio.gather(*sends, return_exceptions=True), strict=True):
            if isinstance(outcome, SextetError) and not isinstance(outcome, Unavailable):
                log.warning("release failed", method=method, member=str(member), error=str(outcome))


def _detours(member: Member, weights: weights_pb2.WeightsRef) -> bool:
    return member.detour is not None and member.detour.holds(weights.endpoints[0])


def _gathering(members: Iterable[Member]) -> weights_pb2.WeightsGathering:
    """These replicas, who are to take a version together."""
    return weights_pb2.WeightsGathering(id=secrets.token_hex(8), members=sorted(m.info.replica for m in members))
