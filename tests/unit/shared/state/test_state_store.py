"""One suite for every StateStore: memory and a real Redis."""

import asyncio
import time

import pytest

from shared.rpc import errors
from shared.state import StateStore, open_store
from shared.state.embedded import EmbeddedRedis
from shared.state.store import redact


async def test_values(store: StateStore) -> None:
    assert await store.get("sextet:v") is None
    await store.put("sextet:v", b"\x00\xff binary")
    assert await store.get("sextet:v") == b"\x00\xff binary"
    await store.put("sextet:v", b"")
    assert await store.get("sextet:v") == b""
    await store.delete("sextet:v")
    await store.delete("sextet:v")
    assert await store.get("sextet:v") is None


async def test_values_expire(store: StateStore) -> None:
    await store.put("sextet:t", b"1", ttl=1)
    assert await store.get("sextet:t") == b"1"
    assert await store.scan("sextet:t") == {"sextet:t": b"1"}
    await asyncio.sleep(1.1)
    assert await store.get("sextet:t") is None
    assert await store.scan("sextet:t") == {}
    await store.put("sextet:t", b"1", ttl=0.1)
    await store.put("sextet:t", b"2")
    await asyncio.sleep(0.15)
    assert await store.get("sextet:t") == b"2"


async def test_scan_takes_the_prefix_literally_and_leaves_streams_out(store: StateStore) -> None:
    for key in ("sextet:a:1", "sextet:a:2", "sextet:a*:3", "sextet:b:4", "sextet:a?:5", "sextet:[a]:6"):
        await store.put(key, key.encode())
    await store.append("sextet:a:stream", {"k": "v"}, 10)
    assert await store.scan("sextet:a:") == {"sextet:a:1": b"sextet:a:1", "sextet:a:2": b"sextet:a:2"}
    assert set(await store.scan("sextet:a*")) == {"sextet:a*:3"}
    assert set(await store.scan("sextet:[a]")) == {"sextet:[a]:6"}
    for number in range(2500):
        await store.put(f"sextet:many:{number}", b"x")
    assert len(await store.scan("sextet:many:")) == 2500


async def test_counters(store: StateStore) -> None:
    await store.delete("sextet:n")
    assert sorted(await asyncio.gather(*(store.increment("sextet:n") for _ in range(20)))) == list(range(1, 21))


async def test_streams(store: StateStore) -> None:
    name = f"sextet:s:{time.time_ns()}"
    assert await store.read(name, "", 0) == []
    cursors = [await store.append(name, {"n": str(n), "text": "é"}, 1000) for n in range(5)]
    entries = await store.read(name, "", 0)
    assert [cursor for cursor, _ in entries] == cursors
    assert entries[0][1] == {"n": "0", "text": "é"}
    assert [fields["n"] for _, fields in await store.read(name, cursors[2], 0)] == ["3", "4"]
    assert await store.read(name, cursors[-1], 0) == []


async def test_a_stream_is_waited_for(store: StateStore) -> None:
    name = f"sextet:w:{time.time_ns()}"
    began = time.monotonic()
    assert await store.read(name, "", 0.2) == []
    assert 0.15 < time.monotonic() - began < 8
    reading = asyncio.create_task(store.read(name, "", 60))
    await asyncio.sleep(0.05)
    await store.append(name, {"k": "v"}, 10)
    assert [fields for _, fields in await asyncio.wait_for(reading, 30)] == [{"k": "v"}]


async def test_a_stream_keeps_about_as_much_as_asked(store: StateStore) -> None:
    name = f"sextet:k:{time.time_ns()}"
    for n in range(600):
        await store.append(name, {"n": str(n)}, 100)
    entries = await store.read(name, "", 0)
    assert 100 <= len(entries) < 300
    assert entries[-1][1] == {"n": "599"}


async def test_a_lease_has_one_owner(store: StateStore) -> None:
    key = f"sextet:lease:{time.time_ns()}"
    assert await store.acquire(key, "a", 60)
    assert await store.acquire(key, "a", 60), "a retry after a lost answer finds its own lease"
    assert not await store.acquire(key, "b", 5)
    assert not await store.renew(key, "b", 5)
    await store.release(key, "b")
    assert await store.renew(key, "a", 0.1)
    await asyncio.sleep(0.15)
    assert not await store.renew(key, "a", 5), "an expired lease is not renewed but acquired"
    assert await store.acquire(key, "b", 5)
    await store.release(key, "b")
    assert await store.acquire(key, "a", 5)


async def test_of_many_one_acquires(store: StateStore) -> None:
    key = f"sextet:race:{time.time_ns()}"
    assert sum(await asyncio.gather(*(store.acquire(key, str(n), 5) for n in range(20)))) == 1


async def test_keys_outside_of_the_prefix_are_refused(store: StateStore) -> None:
    for action in (
        lambda: store.get("epoch"),
        lambda: store.put("epoch", b""),
        lambda: store.increment("epoch"),
        lambda: store.scan(""),
        lambda: store.acquire("epoch", "a", 1),
        lambda: store.append("epoch", {"a": "b"}, 1),
    ):
        with pytest.raises(ValueError, match="must start with 'sextet:'"):
            await action()


async def test_memory_stores_are_shared_by_name() -> None:
    await open_store("memory://one").put("sextet:x", b"1")
    assert await open_store("memory://one").get("sextet:x") == b"1"
    assert await open_store("memory://two").get("sextet:x") is None


def test_other_urls_are_refused_without_their_password() -> None:
    with pytest.raises(ValueError, match=r"postgres://me:\*\*\*@h/0.*use redis://"):
        open_store("postgres://me:secret@h/0")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:secret@h:1/0", "redis://:***@h:1/0"),
        ("redis://me:se@cret@h:1/0", "redis://me:***@h:1/0"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    assert redact(url) == shown


async def test_an_unreachable_redis_is_named_within_seconds() -> None:
    store = open_store("redis://:secret@127.0.0.1:9/0")
    began = time.monotonic()
    with pytest.raises(errors.Unavailable, match=r"redis://:\*\*\*@127\.0\.0\.1:9/0.*`sextet up`.*SEXTET_REDIS_URL"):
        await store.get("sextet:x")
    assert time.monotonic() - began < 20
    await store.close()


async def test_a_wrong_password_is_said_to_be_that(redis_server: EmbeddedRedis) -> None:
    store = open_store(f"redis://:wrong@127.0.0.1:{redis_server.port}/0")
    with pytest.raises(errors.Unauthenticated, match="refuses the password"):
        await store.ping()
    await store.close()


async def test_a_cancelled_call_is_cancelled_whenever_that_happens(redis_server: EmbeddedRedis) -> None:
    store = open_store(redis_server.url)
    await store.ping()
    for ticks in range(60):
        calling = asyncio.create_task(store.put("sextet:x", b"1", 1.0))
        for _ in range(ticks % 12):
            await asyncio.sleep(0)
        late = calling.done()
        calling.cancel()
        await asyncio.wait([calling], timeout=5)
        assert late or calling.cancelled(), f"cancelled after {ticks % 12} ticks, and nobody noticed"
    assert await store.get("sextet:x") == b"1"
    await store.close()


async def test_a_cancelled_task_can_still_clean_up(redis_server: EmbeddedRedis) -> None:
    store = open_store(redis_server.url)
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await store.put("sextet:clean", b"1")
            cleaned.append(await store.get("sextet:clean"))

    working = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    working.cancel()
    await asyncio.wait([working], timeout=5)
    assert cleaned == [b"1"]
    await store.close()
