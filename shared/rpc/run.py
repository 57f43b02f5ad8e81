"""Keeps every role's `__main__.py` short: settings, operations, batches, servicers, serve, exit code."""

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import structlog

from shared.batch.reader import BatchReader
from shared.batch.store import BatchStore, DataServicer
from shared.failpoints import in_role
from shared.gen.sextet.v1 import batch_pb2_grpc, role_pb2_grpc
from shared.http import AddressError
from shared.rpc.client import Connections
from shared.rpc.history import History
from shared.rpc.lifetime import tie_to_parent
from shared.rpc.memory import keep_freed_memory
from shared.rpc.operations import Operations
from shared.rpc.ranks import Ranks
from shared.rpc.role import RoleBackend, RoleServicer
from shared.rpc.server import EXIT_SETTINGS, Services, serve
from shared.rpc.settings import ServiceSettings, SettingsError
from shared.telemetry import logs

log = structlog.get_logger()
_STOPPED_SECONDS = 15.0

Settings = TypeVar("Settings", bound=ServiceSettings)


@dataclass(frozen=True)
class RoleContext(Generic[Settings]):
    """What a role's servicer and backend are built from."""

    settings: Settings
    operations: Operations
    store: BatchStore
    connections: Connections
    reader: BatchReader


@dataclass(frozen=True)
class RoleParts:
    """What a role adds to the common services.

    Attributes:
        backend: the role's backend.
        services: (generated add_...Servicer_to_server, servicer) pairs.
        service_names: their full names, "sextet.v1.ActorService" and so on.
        on_bound: told this process's host:port for others, before it serves.
        on_stopped: ends what the backend has started (processes of its own) when nothing is served any more; it has
            seconds, then the process ends without it.
        beside: entered before the role serves and left when it does no more; yields facts for the registry.
        ranks: the processes of this replica, if it has more than this one.
    """

    backend: RoleBackend
    services: Services
    service_names: Sequence[str]
    on_bound: Callable[[str], None] = lambda endpoint: None
    on_stopped: Callable[[], Awaitable[None]] | None = None
    beside: Callable[[RoleServicer], AbstractAsyncContextManager[Mapping[str, str]]] | None = None
    ranks: Ranks | None = None


def run_role(settings_type: type[Settings], build: Callable[[RoleContext[Settings]], RoleParts]) -> NoReturn:
    """The whole life of a role's process; ends with its exit code (see `serve`)."""
    try:
        settings = settings_type.load()
    except SettingsError as error:
        print(f"sextet {settings_type.model_fields['role'].default}: {error}", file=sys.stderr)
        sys.exit(EXIT_SETTINGS)
    in_role(settings.role)
    logs.configure(settings.role, settings.replica, settings.log_level)
    tie_to_parent()
    keep_freed_memory()
    sys.exit(asyncio.run(_run(settings, build)))


async def _run(settings: Settings, build: Callable[[RoleContext[Settings]], RoleParts]) -> int:
    code, clean = await serve_role(settings, build)
    if not clean:
        # A thread that still computes would keep the interpreter alive until it is done.
        sys.stderr.flush()
        os._exit(code)
    return code


async def serve_role(
    settings: Settings, build: Callable[[RoleContext[Settings]], RoleParts], **events: Any
) -> tuple[int, bool]:
    """Serves a role in this event loop; answers the exit code and whether all operations came to their end."""
    incarnation, clean = secrets.token_hex(8), True
    history = History(settings.data_dir / "history" / f"{settings.replica}.jsonl", incarnation)
    operations, store = Operations(history=history), BatchStore(settings.max_held_bytes)
    connections = Connections(settings.token.get_secret_value(), tls=settings.tls)
    parts = build(RoleContext(settings, operations, store, connections, BatchReader(connections, store)))
    role = RoleServicer(settings, operations, store, parts.backend, incarnation, parts.ranks)

    async def on_stop() -> None:
        nonlocal clean
        # Stays false when `serve` has no more patience than this.
        clean = False
        clean = await operations.drain(settings.drain_timeout)

    def on_bound(endpoint: str) -> None:
        store.endpoint = endpoint
        parts.on_bound(endpoint)

    stack = AsyncExitStack()
    try:
        if parts.beside is not None:
            role.facts.update(await stack.enter_async_context(parts.beside(role)))
        code = await serve(
            settings,
            [
                (role_pb2_grpc.add_RoleServiceServicer_to_server, role),
                (batch_pb2_grpc.add_DataServiceServicer_to_server, DataServicer(store)),
                *parts.services,
            ],
            service_names=["sextet.v1.RoleService", "sextet.v1.DataService", *parts.service_names],
            describe=role.state,
            on_bound=on_bound,
            on_stop=on_stop,
            incarnation=incarnation,
            **events,
        )
    except AddressError as error:
        print(f"sextet {settings.role}: {error}", file=sys.stderr)
        code = EXIT_SETTINGS
    finally:
        await stack.aclose()
        if parts.on_stopped is not None:
            clean &= await _stopped(parts.on_stopped)
        await connections.close()
    return code, clean


async def _stopped(on_stopped: Callable[[], Awaitable[None]]) -> bool:
    """Whether it came to its end; an engine that hangs never lets go of what it has."""
    stopping = asyncio.ensure_future(on_stopped())
    await asyncio.wait({stopping}, timeout=_STOPPED_SECONDS)
    if not stopping.done():
        log.error("what the role has started does not end: the process ends without it", seconds=_STOPPED_SECONDS)
        return False
    stopping.result()
    return True
