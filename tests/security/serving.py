"""Services in this event loop: with servicers that only note what reached them, and as they really are."""

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from services.controller.service import run
from services.controller.settings import ControllerSettings
from shared.rpc.server import serve
from shared.rpc.settings import ServiceSettings
from shared.state import open_store
from shared.state.registry import Replica, ReplicaState, list_replicas
from tests.fakes.role import TOKEN, fake_role
from tests.security.methods import recording_services

ROLES = ("rollout", "actor", "critic", "reward", "reference")
COMMON = {"token": TOKEN, "metrics_port": -1, "drain_timeout": 0}


@contextlib.asynccontextmanager
async def _running(start: Callable[[asyncio.Event, asyncio.Event], Awaitable[Any]]) -> AsyncIterator[None]:
    started, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.ensure_future(start(started, stop))
    waiting = asyncio.create_task(started.wait())
    await asyncio.wait([task, waiting], timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert started.is_set(), task
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 30)


@contextlib.asynccontextmanager
async def recording(calls: list[str]) -> AsyncIterator[str]:
    """All services of the protos behind one port, with reflection; yields the endpoint."""
    settings = ServiceSettings.model_validate({**COMMON, "redis_url": "memory://recording", "reflection": True})
    bound: list[str] = []

    def start(started: asyncio.Event, stop: asyncio.Event) -> Awaitable[Any]:
        return serve(
            settings, recording_services(calls), service_names=[], describe=ReplicaState, started=started, stop=stop,
            on_bound=bound.append,
        )  # fmt: skip

    async with _running(start):
        yield bound[0]


def real_role(role: str, directory: Path, **values: Any) -> Any:
    """A role as `python -m services.ROLE` builds it; yields a RunningRole."""
    main = importlib.import_module(f"services.{role}.__main__")
    kind = getattr(importlib.import_module(f"services.{role}.settings"), f"{role.capitalize()}Settings")
    threads = {"threads": 1} if "threads" in kind.model_fields else {}
    return fake_role(main.build, kind, data_dir=directory, drain_timeout=0, **threads, **values)


@contextlib.asynccontextmanager
async def real_controller(directory: Path, **values: Any) -> AsyncIterator[Replica]:
    """Yields its entry in the registry."""
    url = f"memory://{directory}"
    settings = ControllerSettings.model_validate(
        {**COMMON, "runs_dir": directory / "runs", "data_dir": directory, "redis_url": url, **values}
    )
    async with _running(lambda started, stop: run(settings, started=started, stop=stop)):
        yield (await list_replicas(open_store(url), "controller"))[0]
