"""Registration under a lease: expiry, take-over, outage of Redis and return."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.rpc import errors
from shared.state import StateStore, lease, open_store
from shared.state.embedded import start_redis
from shared.state.registry import Registration, ReplicaState, list_replicas
from tests.fakes.ports import kept_port

TTL = 1.5


def registration(
    store: StateStore,
    replica: str = "actor-1",
    incarnation: str = "i1",
    role: str = "actor",
    describe: Callable[[], ReplicaState] = ReplicaState,
) -> Registration:
    return Registration(store, role, replica, "h:1", incarnation, describe, TTL, {"metrics": "h:2"})


async def eventually(condition: Any, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_an_entry_says_what_the_replica_says(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    now = ReplicaState("r", 7, 0, "", {"engine": "hf"})
    registered = registration(store, describe=lambda: now)
    await registered.start()
    (replica,) = await list_replicas(store, "actor")
    assert (replica.role, replica.replica, replica.endpoint, replica.incarnation) == ("actor", "actor-1", "h:1", "i1")
    assert (replica.state, replica.run, replica.version, replica.running) == ("ready", "r", 7, 0)
    assert replica.facts["engine"] == "hf"
    assert replica.facts["metrics"] == "h:2"
    assert replica.facts["pid"] == str(os.getpid())
    assert replica.facts["gpus"] == "4,6"
    for changed, state in ((ReplicaState(running=2), "busy"), (ReplicaState(running=2, fault="gone"), "suspect")):
        now = changed
        await eventually(lambda state=state: has_state(store, state))
    await registered.drain()
    assert await has_state(store, "draining")
    await registered.stop()
    assert await list_replicas(store) == []
    assert await store.acquire("sextet:leases:actor:actor-1", "anybody", 1)


async def has_state(store: StateStore, state: str) -> bool:
    return [replica.state for replica in await list_replicas(store)] == [state]


async def test_entries_of_other_versions_do_not_hide_the_rest(store: StateStore) -> None:
    registered = registration(store)
    await registered.start()
    entry = json.loads((await store.scan("sextet:replicas:actor:"))["sextet:replicas:actor:actor-1"])
    newer = {**entry, "replica": "newer", "a_new_field": 1}
    await store.put("sextet:replicas:actor:newer", json.dumps(newer).encode())
    for number, strange in enumerate((b"not json", b"[]", b"{}", b"\xff")):
        await store.put(f"sextet:replicas:actor:strange-{number}", strange)
    assert [replica.replica for replica in await list_replicas(store)] == ["actor-1", "newer"]
    await registered.stop()


async def test_roles_are_listed_apart(store: StateStore) -> None:
    made = [registration(store, "b"), registration(store, "a"), registration(store, "c", role="critic")]
    for registered in made:
        await registered.start()
    assert [replica.replica for replica in await list_replicas(store, "actor")] == ["a", "b"]
    assert [replica.replica for replica in await list_replicas(store)] == ["a", "b", "c"]
    for registered in made:
        await registered.stop()


async def test_a_silent_replica_is_gone_after_its_ttl_and_its_successor_waits_for_that(store: StateStore) -> None:
    dead = registration(store)
    await dead.start()
    assert dead._task
    dead._task.cancel()
    successor = registration(store, incarnation="i2")
    await successor.start()
    assert [replica.incarnation for replica in await list_replicas(store)] == ["i2"]
    await successor.stop()


async def test_a_predecessor_killed_on_this_machine_is_not_waited_for(store: StateStore) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    killed = lease.owner("i1").replace(f".{os.getpid()}", f".{process.pid}")
    assert await store.acquire("sextet:leases:actor:actor-1", killed, 600)
    successor = registration(store, incarnation="i2")
    # It would wait for no longer than its own ttl, and then give up.
    await successor.start()
    assert [replica.incarnation for replica in await list_replicas(store)] == ["i2"]
    await successor.stop()


async def test_a_living_replicas_id_is_not_taken(store: StateStore) -> None:
    first = registration(store)
    await first.start()
    with pytest.raises(errors.FailedPrecondition, match=r"'actor-1'.*--replica"):
        await registration(store, incarnation="i2").start()
    assert not first.lost.is_set()
    await first.stop()


async def test_a_frozen_replica_learns_that_it_was_replaced_and_leaves_the_entry_alone(store: StateStore) -> None:
    frozen = registration(store)
    await frozen.start()
    # What a freeze of more than a ttl does: the lease expires, another process takes the id.
    await store.release("sextet:leases:actor:actor-1", lease.owner("i1"))
    successor = registration(store, incarnation="i2")
    await successor.start()
    await asyncio.wait_for(frozen.lost.wait(), 30)
    await frozen.stop()
    assert [replica.incarnation for replica in await list_replicas(store)] == ["i2"]
    await successor.stop()


@pytest.fixture
def port() -> Iterator[int]:
    with kept_port() as port:
        yield port


async def test_it_survives_a_redis_that_restarts_without_its_data(tmp_path: Path, port: int) -> None:
    server = start_redis(tmp_path / "redis", port)
    store = open_store(server.url)
    registered = registration(store)
    await registered.start()
    server.stop()
    await asyncio.sleep(2 * TTL)
    for file in (tmp_path / "redis" / "appendonlydir").iterdir():
        file.unlink()
    again = start_redis(tmp_path / "redis", port)
    assert again.url == server.url
    try:
        await eventually(lambda: has_state(store, "ready"))
        assert not registered.lost.is_set()
    finally:
        await registered.stop()
        await store.close()
        again.stop()


@pytest.mark.slow
async def test_it_survives_a_frozen_redis(tmp_path: Path) -> None:
    server = start_redis(tmp_path / "redis")
    store = open_store(server.url)
    registered = registration(store)
    await registered.start()
    server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(errors.Unavailable):
            await asyncio.wait_for(store.get("sextet:x"), 10)
    finally:
        server.process.send_signal(signal.SIGCONT)
    try:
        await eventually(lambda: has_state(store, "ready"), 15)
    finally:
        await registered.stop()
        await store.close()
        server.stop()
