"""A controller's runs over fake roles, all in one event loop."""

import asyncio
import contextlib
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.controller import cluster as cluster_module
from services.controller.cluster import Cluster
from services.controller.leader import Leadership
from services.controller.runs import Record, Runs
from shared.rpc.client import Connections
from shared.state import StateStore, open_store
from tests.fakes.sextet import TOKEN, FakeSextet

ALL = ("rollout-0", "actor-0", "critic-0", "reward-0", "reference-0")
_numbers = itertools.count()


def failing(error: Callable[[], Exception], times: int) -> Callable[[Any], Awaitable[None]]:
    """A fake's hook that raises an error so many times."""
    left = [times]

    async def fail(request: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise error()

    return fail


class Controller:
    """Runs and cluster; can be ended and begun again over the same store."""

    def __init__(self, store: StateStore, root: Path) -> None:
        self.store, self.root = store, root

    async def __aenter__(self) -> "Controller":
        self._stack = contextlib.AsyncExitStack()
        self._connections = Connections(TOKEN)
        self._stack.push_async_callback(self._connections.close)
        self.cluster = Cluster(self.store, self._connections)
        await self._stack.enter_async_context(self.cluster.watching())
        self.leadership = Leadership(self.store, secrets.token_hex(4), ttl=1.5)
        await self._stack.enter_async_context(self.leadership.sought())
        self.runs = Runs(self.store, self.cluster, self.leadership, self.root)
        await self._stack.enter_async_context(self.runs.playing())
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._stack.aclose()

    async def create(self, id: str = "", **changes: Any) -> Record:
        return await self.runs.create(json.dumps(config(**changes)), id)

    async def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def over(self, id: str, seconds: float = 60) -> Record:
        record = await self.runs.get(id)
        await self.until(lambda: record.state in ("done", "failed", "cancelled"), seconds)
        return record

    async def events(self, id: str) -> list[tuple[str, int, str]]:
        return [(event.kind, event.step, event.message) async for event in self.runs.watch(id, "")]


def config(**changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "flow": "ppo",
        "total_steps": 3,
        "model": {"path": "m"},
        "data": {"path": "d", "batch_size": 4},
        "rollout": {"n": 2},
        "reward": {"function": "a:b"},
        "algorithm": {"kl": {"placement": "loss"}},
        "recovery": {"backoff": 1.0, "replica_timeout": 5.0},
        "checkpoint": {"save_interval": 2},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[key] = value
    return tree


@pytest.fixture(autouse=True)
def quick_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "REFRESH_SECONDS", 0.05)


@pytest.fixture
def store() -> StateStore:
    return open_store(f"memory://controller-{next(_numbers)}")


@pytest_asyncio.fixture
async def fakes(store: StateStore) -> AsyncIterator[FakeSextet]:
    sextet = FakeSextet(store)
    yield sextet
    await sextet.close()


@pytest_asyncio.fixture
async def controller(store: StateStore, tmp_path: Path) -> AsyncIterator[Controller]:
    async with Controller(store, tmp_path / "runs") as running:
        yield running
