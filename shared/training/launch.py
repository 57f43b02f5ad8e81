"""Starts a role that trains: as one process, or as the first of several ranks, which it starts and ends with itself.

`--world-size N` starts N ranks on this machine; their store listens on loopback only, and so do their groups unless the
service is reachable from other machines (--bind). Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR in the environment)
each process is one rank, on as many machines as it spans. Where torch's traffic leaves loopback, the network has to be
one's own: it is neither encrypted nor authenticated.
"""

import asyncio
import ctypes
import datetime
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist

from shared.batch.reader import BatchReader
from shared.batch.store import BatchStore
from shared.failpoints import in_role
from shared.rpc.client import Connections
from shared.rpc.lifetime import PARENT_VARIABLE, tie_to_parent
from shared.rpc.memory import keep_freed_memory
from shared.rpc.operations import Operations
from shared.rpc.ranks import Alone, Handlers, Ranks
from shared.rpc.role import RoleServicer
from shared.rpc.run import RoleContext, RoleParts, run_role
from shared.rpc.server import EXIT_SETTINGS
from shared.rpc.settings import SettingsError
from shared.telemetry import logs

from .device import take_gpu
from .group import ALONE, IDLE, Group
from .role import ModelSettings
from .spmd import EXIT_GROUP, Spmd, Watch

Settings = TypeVar("Settings", bound=ModelSettings)
START_SECONDS = 180.0
"""In which all ranks have to be there: they import torch and transformers on a machine that may be busy."""
_PR_SET_PDEATHSIG = 1


class Build(Protocol[Settings]):
    """Makes a role's parts, and what every rank of it does."""

    def __call__(self, context: RoleContext[Settings], group: Group, ranks: Ranks) -> tuple[RoleParts, Handlers]: ...


def run_training_role(settings_type: type[Settings], build: Build[Settings]) -> NoReturn:
    """The whole life of a role's process, or of one of its ranks."""
    try:
        settings = settings_type.load()
    except SettingsError as error:
        print(f"sextet {settings_type.model_fields['role'].default}: {error}", file=sys.stderr)
        sys.exit(EXIT_SETTINGS)
    size, rank = int(os.environ.get("WORLD_SIZE", settings.world_size)), int(os.environ.get("RANK", 0))
    if size == 1:
        run_role(settings_type, alone(build))
    if rank > 0:
        _run_rank(settings, build, rank, size)
    children: list[subprocess.Popen[bytes]] = []
    store = _store(size) if "RANK" in os.environ else _start_ranks(settings, size, children)
    group = Group(0, size)
    watch = Watch(group, _client(size), settings.rank_timeout, children)
    watch.start()
    _join(group, store)
    spmd = Spmd(group, _client(size), watch, settings.rank_timeout)
    code = EXIT_GROUP
    try:
        run_role(settings_type, lambda context: build(context, group, spmd)[0])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        for child in children:
            child.kill()
        sys.stderr.flush()
        # The other ranks are gone: taking the process groups down in order would wait for them.
        os._exit(code)


def alone(build: Build[Settings]) -> Callable[[RoleContext[Settings]], RoleParts]:
    """For a replica of one process."""
    return lambda context: build(context, ALONE, Alone())[0]


def _start_ranks(settings: ModelSettings, size: int, children: list["subprocess.Popen[bytes]"]) -> Any:
    """Rank 0's store, and the other ranks on this machine. They are children of this thread, which lives on."""
    listener = socket.create_server(("127.0.0.1", 0))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    os.environ["LOCAL_RANK"] = "0"
    if settings.loopback:
        # What gloo and NCCL open listens on this machine only. A service that others reach may exchange weights with
        # other machines by the same libraries.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    store = _store(size, listener.detach())
    for rank in range(1, size):
        places = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            PARENT_VARIABLE: str(os.getpid()),
        }
        command = [sys.executable, "-m", f"services.{settings.role}", *sys.argv[1:]]
        children.append(subprocess.Popen(command, env={**os.environ, **places}, stdin=subprocess.DEVNULL))
    return store


def _client(size: int) -> Any:
    """Another connection to the store: a thread that waits on one must not hold up the others."""
    return _store(size, serve=False)


def _store(size: int, listener: int | None = None, serve: bool | None = None) -> Any:
    """torch's key-value store, served by rank 0 or, under torchrun, by its agent."""
    if serve is None:
        serve = os.environ.get("RANK", "0") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, serve,
        timeout=datetime.timedelta(seconds=START_SECONDS), wait_for_workers=False, master_listen_fd=listener,
    )  # fmt: skip
    # An agent's store outlives its ranks.
    prefix = f"sextet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]


def _join(group: Group, store: Any) -> None:
    """Makes the process groups: one for tensors, one for commands."""
    backend = "gloo"
    if torch.cuda.is_available():
        take_gpu(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.PrefixStore("groups", store), rank=group.rank, world_size=group.size)  # pyright: ignore[reportPrivateImportUsage]
    group.control = dist.new_group(backend="gloo", timeout=IDLE)  # pyright: ignore[reportAttributeAccessIssue]


def _run_rank(settings: Settings, build: Build[Settings], rank: int, size: int) -> NoReturn:
    """A rank that is not the gRPC face: it does what rank 0 passes on, until that one is gone."""
    tie_to_parent()
    if os.environ.get(PARENT_VARIABLE) and sys.platform == "linux":
        # A frozen process would not see a gentler signal.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    in_role(settings.role)
    logs.configure(settings.role, f"{settings.replica}/{rank}", settings.log_level)
    keep_freed_memory()
    store, group = _store(size), Group(rank, size)
    watch = Watch(group, _client(size), settings.rank_timeout)
    watch.start()
    _join(group, store)
    spmd = Spmd(group, _client(size), watch, settings.rank_timeout)
    asyncio.run(_follow(settings, build, group, spmd))
    raise AssertionError("a rank follows to its end")


async def _follow(settings: Settings, build: Build[Settings], group: Group, spmd: Spmd) -> NoReturn:
    operations, store = Operations(), BatchStore(1)
    connections = Connections(settings.token.get_secret_value(), tls=settings.tls)
    context = RoleContext(settings, operations, store, connections, BatchReader(connections))
    parts, handlers = build(context, group, spmd)
    role = RoleServicer(settings, operations, store, parts.backend, ranks=spmd)
    await spmd.follow({**role.handlers, **handlers})
