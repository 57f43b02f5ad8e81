"""How a run takes hold of the cluster: the first time, after a pause, after the controller or a role died. One way."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import structlog

from services.controller import verbs
from services.controller.checkpoints import Checkpoint, directories, load, root_of, step_of
from services.controller.cluster import Cluster, Session
from services.controller.dispatch import gather
from services.controller.journal import Journal, Position, encode_weights
from services.controller.pool import RoleMissing
from services.controller.replica import Member, Refused, ReplicaLost, operate
from shared.config import RunConfig
from shared.gen.sextet.v1 import actor_pb2, role_pb2
from shared.places import Place, place
from shared.rpc.errors import DamagedCheckpoint, SextetError
from shared.state import StateStore

log = structlog.get_logger()
EPOCH_KEY = "sextet:epoch"


async def new_term(store: StateStore, cluster: Cluster, journal: Journal) -> int:
    """A fencing epoch above all that were ever used: the store may have been emptied, roles and journals remember."""
    members = [member for pool in cluster.pools.values() for member in pool.members]
    answers = await asyncio.gather(*(member.describe() for member in members), return_exceptions=True)
    seen = [answer.epoch for answer in answers if isinstance(answer, role_pb2.DescribeResponse)]
    highest = max([journal.epoch, *seen])
    epoch = await store.increment(EPOCH_KEY)
    if epoch <= highest:
        epoch = highest + 1
        await store.put(EPOCH_KEY, str(epoch).encode())
    return epoch


class Establishment:
    """Brings all roles of a run to one position: where they are, if they hold it; else to the newest checkpoint.

    Args:
        directory: the run's directory.
        warn: told, with its step, of a checkpoint that is passed over, and why.
        cause: why the run lost its hold, if it had one.
    """

    def __init__(
        self, store: StateStore, cluster: Cluster, journal: Journal, config: RunConfig, directory: Path,
        warn: Callable[[str, int], Awaitable[None]], cause: str = "",
    ) -> None:  # fmt: skip
        self._store, self._cluster, self._journal = store, cluster, journal
        self._config, self._directory, self._warn, self._cause = config, directory, warn, cause
        self.epoch = 0

    async def run(self, run: str, config_json: str, roles: frozenset[str], *, back: bool) -> Session:
        """The session, with all roles ready.

        Args:
            back: to the checkpoint in any case, since the step in progress can't be finished.

        Raises:
            RoleMissing: a role is missing; Refused: a role can't do this run.
            DamagedCheckpoint: there are checkpoints, and none can be used.
        """
        session = await self._begin(run, config_json, roles)
        if self._journal.begun and not back and await self._held(session):
            try:
                return await self._settle(session, self._attach(session))
            except RoleMissing as error:
                # A rollout may need weights that nobody has any more.
                log.warning("the run can't go on where it is", run=run, error=str(error))
                session = await self._begin(run, config_json, roles)
        return await self._settle(session, await self._restore(session))

    async def _begin(self, run: str, config_json: str, roles: frozenset[str]) -> Session:
        await self._cluster.refresh()
        self.epoch = epoch = await new_term(self._store, self._cluster, self._journal)
        session = Session(run, self._config, config_json, roles, epoch, self._journal.take)
        session.facts = {role: dict(facts) for role, facts in self._journal.facts.items()}
        session.step = self._journal.position.step + 1
        await self._cluster.unassign()
        await self._cluster.assign(session)
        session.kept = await self._kept_members(roles & verbs.KEPT)
        return session

    async def _settle(self, session: Session, position: Position) -> Session:
        session.settled.set()
        await self._cluster.unless_lost(session, self._wait(session.roles))
        await self._journal.begin(session.epoch, position, session.facts)
        return session

    async def _kept_members(self, roles: frozenset[str]) -> dict[str, Member]:
        timeout = self._config.recovery.replica_timeout
        found = await gather(self._cluster.pools[role].wait(1, timeout) for role in sorted(roles))
        return dict(zip(sorted(roles), (members[0] for members in found), strict=True))

    async def _held(self, session: Session) -> bool:
        """Actor and critic hold the committed state of this run, or what the step in progress made of it.

        That step is then played again under the same ids: what was done answers with its result, what was not is done.
        Should its inputs turn out to differ, the role refuses the update, and only then the run goes back.
        """
        for role, member in session.kept.items():
            try:
                standing = await member.describe()
            except (SextetError, ReplicaLost):
                return False
            committed = self._journal.position.versions[role]
            ahead = standing.version > committed and f"{role}.update" in self._journal.issued
            if standing.fault or standing.run != session.run or not (ahead or standing.version == committed):
                return False
        return True

    def _attach(self, session: Session) -> Position:
        session.weights = self._journal.position.weights_ref
        session.attached = True
        session.ahead = "actor.update" in self._journal.issued
        return self._journal.position

    async def _restore(self, session: Session) -> Position:
        if self._journal.begun:
            await self._journal.rollback(session.epoch, self._cause or "the roles do not hold its state")
            session.take = self._journal.take
        root = root_of(self._config, session.run, self._directory)
        checkpoints = await asyncio.to_thread(directories, root)
        if self._config.resume_from:
            checkpoints.append(place(self._config.resume_from))
        position = await self._configure_kept(session, checkpoints)
        session.step = position.step + 1
        if any(position.versions.values()):
            published = await operate(
                session.kept["actor"],
                verbs.PUBLISH_WEIGHTS,
                session.identify(actor_pb2.PublishWeightsRequest(), verbs.PUBLISH_WEIGHTS),
                self._config.recovery,
            )
            session.weights = published.weights
            position = replace(position, weights=encode_weights(published.weights))
        return position

    async def _configure_kept(self, session: Session, checkpoints: list[Place]) -> Position:
        """Loads the newest checkpoint that is not damaged; the model as configured where there is none at all."""
        damages: list[str] = []
        for directory in checkpoints:
            try:
                checkpoint = await asyncio.to_thread(load, directory)
                return replace(checkpoint.position, versions=await self._configure_all(session, checkpoint))
            except (DamagedCheckpoint, Refused) as error:
                # Whatever else keeps a role from loading it would keep it from loading an older one, or will pass.
                if isinstance(error, Refused) and not isinstance(error.cause, DamagedCheckpoint):
                    raise
                damages.append(str(error))
                if directory is not checkpoints[-1]:
                    step = step_of(directory.name) or 0
                    message = f"the checkpoint of step {step} can't be used, an older one is tried: {error}"
                    await self._warn(message, step)
        if damages:
            raise DamagedCheckpoint(f"no checkpoint of this run can be used: {'; '.join(damages)}")
        return Position(versions=await self._configure_all(session, None))

    async def _configure_all(self, session: Session, checkpoint: Checkpoint | None) -> dict[str, int]:
        roles = sorted(session.kept)
        versions = await gather(
            self._cluster.configure(session.kept[role], session, checkpoint.of(role) if checkpoint else "")
            for role in roles
        )
        if checkpoint:
            for role, version in zip(roles, versions, strict=True):
                # Whole in itself, but of another step than the directory it lies in.
                if version != (saved := checkpoint.position.versions.get(role)):
                    why = f"checkpoint {checkpoint.of(role)!r} is of version {version}, and its run's was at {saved}"
                    raise Refused(session.kept[role], DamagedCheckpoint(why))
        return dict(zip(roles, versions, strict=True))

    async def _wait(self, roles: frozenset[str]) -> None:
        timeout = self._config.recovery.replica_timeout
        wanted = {role: self._config.rollout.replicas if role == "rollout" else 1 for role in sorted(roles)}
        await gather(self._cluster.pools[role].wait(count, timeout) for role, count in wanted.items())
