"""A store within one process, for tests: same answers as Redis, nothing survives the process."""

import asyncio
import time
from collections.abc import Mapping
from typing import ClassVar

from shared.state.store import check_key

_POLL = 0.01


class MemoryStore:
    """Values, leases and streams in dictionaries. `named` gives everybody who asks for the same URL the same one."""

    _stores: ClassVar[dict[str, "MemoryStore"]] = {}

    def __init__(self) -> None:
        self._values: dict[str, tuple[bytes, float]] = {}
        self._streams: dict[str, list[tuple[str, dict[str, str]]]] = {}
        self._appended = 0

    @classmethod
    def named(cls, url: str) -> "MemoryStore":
        return cls._stores.setdefault(url, cls())

    async def get(self, key: str) -> bytes | None:
        value, expires = self._values.get(check_key(key), (None, 0.0))
        if value is not None and expires <= time.monotonic():
            del self._values[key]
            return None
        return value

    async def put(self, key: str, value: bytes, ttl: float | None = None) -> None:
        self._values[check_key(key)] = (value, float("inf") if ttl is None else time.monotonic() + ttl)

    async def delete(self, key: str) -> None:
        self._values.pop(check_key(key), None)
        self._streams.pop(key, None)

    async def scan(self, prefix: str) -> dict[str, bytes]:
        check_key(prefix)
        keys = [key for key in self._values if key.startswith(prefix)]
        return {key: value for key in keys if (value := await self.get(key)) is not None}

    async def increment(self, key: str) -> int:
        value = int(await self.get(key) or b"0") + 1
        await self.put(key, str(value).encode())
        return value

    async def append(self, stream: str, fields: Mapping[str, str], keep: int) -> str:
        self._appended += 1
        cursor = f"{self._appended}-0"
        entries = self._streams.setdefault(check_key(stream), [])
        entries.append((cursor, dict(fields)))
        del entries[:-keep]
        return cursor

    async def read(self, stream: str, after: str, wait: float) -> list[tuple[str, dict[str, str]]]:
        last = int(after.partition("-")[0] or "0")
        until = time.monotonic() + wait
        while True:
            entries = self._streams.get(check_key(stream), [])
            found = [(cursor, dict(fields)) for cursor, fields in entries if int(cursor.partition("-")[0]) > last]
            if found or time.monotonic() >= until:
                return found[:1000]
            # Polling, since a condition would tie the shared store to one event loop.
            await asyncio.sleep(_POLL)

    async def acquire(self, key: str, owner: str, ttl: float) -> bool:
        if await self.get(key) not in (None, owner.encode()):
            return False
        await self.put(key, owner.encode(), ttl)
        return True

    async def renew(self, key: str, owner: str, ttl: float) -> bool:
        if await self.get(key) != owner.encode():
            return False
        await self.put(key, owner.encode(), ttl)
        return True

    async def release(self, key: str, owner: str) -> None:
        if await self.get(key) == owner.encode():
            await self.delete(key)

    async def ping(self) -> None:
        return None

    async def close(self) -> None:
        return None
