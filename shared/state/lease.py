"""Leases that say who holds them: other processes of that machine can tell that it has ended, and need not wait."""

import functools
import hashlib
import os
import socket
from pathlib import Path

from shared.state.store import StateStore


def owner(incarnation: str) -> str:
    """This process as the owner of a lease."""
    return f"{incarnation}@{machine}.{os.getpid()}" if (machine := _machine()) else incarnation


async def take(store: StateStore, key: str, owner: str, ttl: float) -> bool:
    """Takes or keeps a lease, as `acquire` does; one whose holder was killed on this machine is free at once.

    Raises:
        Unavailable: the store can't be reached.
    """
    if await store.acquire(key, owner, ttl):
        return True
    holder = (await store.get(key) or b"").decode(errors="replace")
    if not _has_ended(holder):
        return False
    await store.release(key, holder)
    return await store.acquire(key, owner, ttl)


def _has_ended(holder: str) -> bool:
    """Known only of processes of this machine (container); a number that another process has by now looks alive."""
    machine, _, pid = holder.partition("@")[2].rpartition(".")
    if not machine or machine != _machine() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


@functools.cache
def _machine() -> str:
    """Names the process numbers that this process sees: host, boot and namespace; "" where that can't be known."""
    try:
        boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return hashlib.sha256(f"{socket.gethostname()} {boot} {namespace}".encode()).hexdigest()[:16]
