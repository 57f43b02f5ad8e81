"""The rollouts that a gateway can send to, as the registry shows them."""

import asyncio
from collections import Counter

import structlog

from shared.routing import home_of, pick
from shared.rpc.errors import SextetError
from shared.state import StateStore
from shared.state.registry import Replica, list_replicas

log = structlog.get_logger()

REFRESH_SECONDS = 0.5
LAG = 1
"""Versions that a replica may seem behind: entries are up to some seconds old, and a weight update takes a moment."""


class Rollouts:
    """Who serves the policy, and how many requests each has of ours."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._replicas: list[Replica] = []
        self.load: Counter[str] = Counter()

    async def watch(self) -> None:
        """Reads the registry until cancelled."""
        while True:
            try:
                await self.refresh()
            except SextetError as error:
                log.warning("the registry cannot be read", error=str(error))
            await asyncio.sleep(REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Reads the registry once."""
        self._replicas = await list_replicas(self._store, "rollout")

    def serving(self) -> dict[str, str]:
        """Addresses by replica: those that work and hold the present weights of the run."""
        able = [
            each for each in self._replicas if each.state in ("ready", "busy") and each.version >= 0 and _address(each)
        ]
        newest = max((each.version for each in able), default=0)
        return {each.replica: _address(each) for each in able if each.version >= newest - LAG}

    def address(self, replica: str) -> str:
        """Where a replica is, whatever it does now; "" when it is gone."""
        return next((_address(each) for each in self._replicas if each.replica == replica), "")

    def choose(self, key: str, without: set[str]) -> str:
        """The replica for a request: where its prefix was served before, unless that is much busier; "" for none."""
        able = sorted(self.serving().keys() - without)
        return pick({replica: self.load[replica] for replica in able}, home_of(key, able)) if able else ""


def _address(replica: Replica) -> str:
    return replica.facts.get("openai", "")
