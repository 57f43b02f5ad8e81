"""What Sextet needs of its global store, and how to open one."""

from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

PREFIX = "sextet:"


class StateStore(Protocol):
    """A small store. All keys start with `sextet:`, so that a Redis can be shared.

    Every method raises Unavailable, naming the store, when it can't be reached within seconds. Calls are retried
    inside, so `increment` may skip numbers and `append` may append twice when an answer is lost.
    """

    async def get(self, key: str) -> bytes | None:
        """The value, or None."""
        ...

    async def put(self, key: str, value: bytes, ttl: float | None = None) -> None:
        """Sets a value; with `ttl` it goes after that many seconds."""
        ...

    async def delete(self, key: str) -> None:
        """Removes a key, if there."""
        ...

    async def scan(self, prefix: str) -> dict[str, bytes]:
        """All keys with this prefix and their values."""
        ...

    async def increment(self, key: str) -> int:
        """Adds one to a counter (first answer: 1)."""
        ...

    async def append(self, stream: str, fields: Mapping[str, str], keep: int) -> str:
        """Adds an entry to a stream, keeps about the last `keep`, and answers the entry's cursor."""
        ...

    async def read(self, stream: str, after: str, wait: float) -> list[tuple[str, dict[str, str]]]:
        """Up to 1000 entries after a cursor ("" is the beginning); waits up to `wait` seconds for the first."""
        ...

    async def acquire(self, key: str, owner: str, ttl: float) -> bool:
        """Takes a lease for `ttl` seconds; true as well when the owner has it already."""
        ...

    async def renew(self, key: str, owner: str, ttl: float) -> bool:
        """Extends a lease; false when the owner does not hold it (any more)."""
        ...

    async def release(self, key: str, owner: str) -> None:
        """Gives a lease back, if the owner holds it."""
        ...

    async def ping(self) -> None:
        """Answers when the store can be used."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


def open_store(url: str) -> StateStore:
    """A store by URL: `redis://[:password@]host:port/db`, `rediss://...`, or `memory://NAME` within one process."""
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        from shared.state.memory import MemoryStore

        return MemoryStore.named(url)
    if scheme in ("redis", "rediss", "unix"):
        from shared.state.redis import RedisStore

        return RedisStore(url)
    raise ValueError(f"state store URL {redact(url)!r}: use redis://host:port/db, rediss:// or memory://")


def redact(url: str) -> str:
    """The URL without its password, for messages and logs."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***@{host}" if at else host))


def check_key(key: str) -> str:
    """The key itself; refuses one outside of our prefix."""
    if not key.startswith(PREFIX):
        raise ValueError(f"state key {key!r} must start with {PREFIX!r}")
    return key
