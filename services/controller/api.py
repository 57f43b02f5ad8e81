"""The controller's API, once: both faces (gRPC, HTTP) call these methods and pass their messages on."""

import asyncio
from collections.abc import AsyncIterator

from services.controller.cluster import Cluster
from services.controller.profiles import MAX_STEPS, Calls
from services.controller.runs import Runs
from services.controller.scalers.base import Scaler
from services.controller.verbs import KEPT, PROFILED_ROLES, ROLES
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.rpc.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from shared.state import StateStore
from shared.state.registry import Replica, list_replicas

SCALE_SECONDS = 90.0
"""A replica that has not registered by then is told about; importing torch takes some seconds."""
SCALE_LOOK_SECONDS = 0.2


class Api:
    """Runs and services. Raises SextetErrors.

    Args:
        cluster: knows how replicas stand with the run that plays.
        scaler: makes and removes replicas; None: someone else does.
    """

    def __init__(self, store: StateStore, runs: Runs, cluster: Cluster, scaler: Scaler | None) -> None:
        self._store, self._runs, self._cluster, self._scaler = store, runs, cluster, scaler

    async def create(self, config_json: str, id: str) -> pb.Run:
        """Queues a run."""
        return (await self._runs.create(config_json, id)).message()

    async def get(self, id: str) -> pb.Run:
        """One run."""
        return (await self._runs.get(id)).message()

    async def list(self) -> "list[pb.Run]":
        """All runs, the newest first."""
        return [record.message() for record in await self._runs.list()]

    def watch(self, id: str, after: str) -> AsyncIterator[pb.RunEvent]:
        """Events after a cursor, until the run is over."""
        return self._runs.watch(id, after)

    async def pause(self, id: str) -> pb.Run:
        """Pauses after the step in progress."""
        return (await self._runs.pause(id)).message()

    async def resume(self, id: str) -> pb.Run:
        """Goes on with a paused or failed run."""
        return (await self._runs.resume(id)).message()

    async def cancel(self, id: str) -> pb.Run:
        """Ends a run now."""
        return (await self._runs.cancel(id)).message()

    async def checkpoint(self, id: str) -> tuple[str, int]:
        """Saves after the step in progress: directory and step."""
        return await self._runs.checkpoint(id)

    async def profile(self, id: str, role: str, steps: int) -> Calls:
        """Has a role's calls in the next steps recorded: what their ranks have seen."""
        if role not in PROFILED_ROLES:
            raise InvalidArgument(f"role: {role!r} has no profiler; {', '.join(PROFILED_ROLES)} have one")
        if not 1 <= steps <= MAX_STEPS:
            raise InvalidArgument(f"steps: {steps} is not between 1 and {MAX_STEPS}")
        return await self._runs.profile(id, role, steps)

    async def services(self) -> "list[pb.ServiceInfo]":
        """What the registry knows."""
        return [
            pb.ServiceInfo(
                role=replica.role,
                replica=replica.replica,
                endpoint=replica.endpoint,
                state=self._cluster.health(replica) or replica.state,
                run=replica.run,
                version=replica.version,
                running=replica.running,
                facts={**replica.facts, **_troubles(replica.fault, self._cluster.detour(replica))},
            )
            for replica in await list_replicas(self._store)
        ]

    async def scale(self, role: str, replicas: int, wait: bool) -> tuple[int, int]:
        """Replicas of a role before, and wanted now; with `wait` once the registry lists them."""
        if role not in ROLES:
            raise InvalidArgument(f"role: {role!r} is none of {', '.join(ROLES)}")
        if role in KEPT and replicas != 1:
            raise InvalidArgument(f"role: {role} holds the state in training: it has one replica, not {replicas}")
        if replicas < 0:
            raise InvalidArgument(f"replicas: {replicas} is negative")
        if self._scaler is None:
            raise FailedPrecondition(
                "this controller starts no replicas: start them where the others run "
                f"(`python -m services.{role}`, docker compose up --scale {role}={replicas}), "
                "or start the controller with --scaler process, docker or kubernetes"
            )
        listed = len(await self._listed(role))
        before, wanted = await self._scaler.scale(role, replicas)
        if wait:
            await self._until_listed(role, wanted, max(wanted, listed - (before - wanted)))
        return before, wanted

    async def _listed(self, role: str) -> "list[Replica]":
        return [each for each in await list_replicas(self._store, role) if each.state != "draining"]

    async def _until_listed(self, role: str, least: int, most: int) -> None:
        end = asyncio.get_running_loop().time() + SCALE_SECONDS
        while not least <= len(found := await self._listed(role)) <= most:
            if asyncio.get_running_loop().time() > end:
                names = ", ".join(each.replica for each in found) or "none"
                raise DeadlineExceeded(
                    f"{role}: {len(found)} of {least} replicas are listed after {SCALE_SECONDS:g} s ({names}): they "
                    "are still coming or going, or end at their start: see their logs"
                )
            await asyncio.sleep(SCALE_LOOK_SECONDS)


def _troubles(fault: str, detour: str) -> dict[str, str]:
    """Of a replica's facts those that are bad news."""
    return {name: text for name, text in (("fault", fault), ("weights", detour)) if text}
