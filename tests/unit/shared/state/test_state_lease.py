"""A lease whose holder was killed on this machine is free at once; any other is waited for."""

import asyncio
import os
import sys

import pytest

from shared.state import lease
from shared.state.memory import MemoryStore

KEY = "sextet:lease"


async def pid_of_an_ended_process() -> int:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    return process.pid


async def test_the_lease_of_an_ended_process_is_free_at_once() -> None:
    store, mine = MemoryStore(), lease.owner("new")
    ended = mine.replace("new@", "old@").replace(f".{os.getpid()}", f".{await pid_of_an_ended_process()}")
    assert await store.acquire(KEY, ended, 60)
    assert await lease.take(store, KEY, mine, 60)
    assert await store.get(KEY) == mine.encode()
    # Kept by its owner as `acquire` keeps it.
    assert await lease.take(store, KEY, mine, 60)


@pytest.mark.parametrize("held", ["lives", "elsewhere", "unknown", "strange"])
async def test_a_lease_that_may_be_held_is_left_alone(held: str) -> None:
    store, mine, pid = MemoryStore(), lease.owner("new"), await pid_of_an_ended_process()
    other = {
        "lives": lease.owner("old"),
        "elsewhere": f"old@0123456789abcdef.{pid}",
        "unknown": "old",
        "strange": f"{mine.rpartition('.')[0]}.{10**30}",
    }[held]
    assert await store.acquire(KEY, other, 60)
    assert not await lease.take(store, KEY, mine, 60)
    assert await store.get(KEY) == other.encode()
