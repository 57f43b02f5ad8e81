"""The store in Redis (or Valkey): bounded time, bounded retries, one clear error when it is not there."""

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, TimeoutError

from shared.rpc.errors import Internal, Unauthenticated, Unavailable
from shared.state.store import check_key, redact

_SOCKET_TIMEOUT = 2.0
_RETRIES = 2
# Blocking reads are sliced below the socket timeout, so that a dead server is still noticed.
_BLOCK = 1.0
_BATCH = 1000

# Idempotent for the owner: a retry after a lost answer must not find its own lease "taken".
_ACQUIRE = """
local owner = redis.call('get', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RENEW = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('pexpire', KEYS[1], ARGV[2])
"""
_RELEASE = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('del', KEYS[1])
"""


class RedisStore:
    """See StateStore.

    Args:
        url: redis://[:password@]host:port/db
    """

    def __init__(self, url: str) -> None:
        self._shown = redact(url)
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=32,
            timeout=5,
            socket_timeout=_SOCKET_TIMEOUT,
            socket_connect_timeout=_SOCKET_TIMEOUT,
            health_check_interval=15,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), _RETRIES),
            retry_on_error=[ConnectionError, TimeoutError],
        )
        self._redis = redis.asyncio.Redis.from_pool(pool)

    async def get(self, key: str) -> bytes | None:
        return await self._do(self._redis.get(check_key(key)))

    async def put(self, key: str, value: bytes, ttl: float | None = None) -> None:
        await self._do(self._redis.set(check_key(key), value, px=None if ttl is None else _milliseconds(ttl)))

    async def delete(self, key: str) -> None:
        await self._do(self._redis.delete(check_key(key)))

    async def scan(self, prefix: str) -> dict[str, bytes]:
        return await self._do(self._scan(check_key(prefix)))

    async def _scan(self, prefix: str) -> dict[str, bytes]:
        pattern = "".join(f"\\{c}" if c in "*?[]\\^" else c for c in prefix) + "*"
        # TYPE string: streams share the name space and have no plain value. Scanning may answer a key twice.
        keys: list[Any] = sorted({key async for key in self._redis.scan_iter(pattern, count=1000, _type="STRING")})
        values: list[Any] = await self._redis.mget(keys) if keys else []
        return {key.decode(): value for key, value in zip(keys, values, strict=True) if value is not None}

    async def increment(self, key: str) -> int:
        return await self._do(self._redis.incr(check_key(key)))

    async def append(self, stream: str, fields: Mapping[str, str], keep: int) -> str:
        added = self._redis.xadd(check_key(stream), dict(fields), maxlen=keep, approximate=True)  # type: ignore[arg-type]
        return (await self._do(added)).decode()

    async def read(self, stream: str, after: str, wait: float) -> list[tuple[str, dict[str, str]]]:
        cursors: Any = {check_key(stream): after or "0"}
        until = time.monotonic() + wait
        while True:
            left = until - time.monotonic()
            # XREAD takes 0 as "for ever".
            block = max(1, _milliseconds(min(left, _BLOCK))) if left > 0 else None
            answer = await self._do(self._redis.xread(cursors, count=_BATCH, block=block))
            if answer or left <= 0:
                return [_entry(*item) for item in _entries_of(answer)]

    async def acquire(self, key: str, owner: str, ttl: float) -> bool:
        return bool(await self._script(_ACQUIRE, key, owner, _milliseconds(ttl)))

    async def renew(self, key: str, owner: str, ttl: float) -> bool:
        return bool(await self._script(_RENEW, key, owner, _milliseconds(ttl)))

    async def release(self, key: str, owner: str) -> None:
        await self._script(_RELEASE, key, owner)

    async def ping(self) -> None:
        await self._do(self._redis.ping())  # type: ignore[arg-type]

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def _script(self, script: str, key: str, *arguments: str | int) -> int:
        return await self._do(self._redis.eval(script, 1, check_key(key), *arguments))  # type: ignore[arg-type]

    async def _do(self, command: Awaitable[Any]) -> Any:
        try:
            return await _cancellable(command)
        except AuthenticationError as error:
            raise Unauthenticated(
                f"Redis at {self._shown} refuses the password ({error}): put it in the URL, "
                "redis://:PASSWORD@host:port/0 (SEXTET_REDIS_URL)"
            ) from None
        except (ConnectionError, TimeoutError, OSError) as error:
            raise Unavailable(
                f"Redis at {self._shown} is not reachable ({error}): start one (`sextet up` does), "
                "or name another with --redis or SEXTET_REDIS_URL",
                url=self._shown,
            ) from None
        except RedisError as error:
            raise Internal(f"Redis at {self._shown}: {error}", url=self._shown) from error


async def _cancellable(command: Awaitable[Any]) -> Any:
    """Awaits a command and keeps a cancellation that came meanwhile.

    redis-py sends through asyncio.wait_for, which on Python 3.11 loses a cancellation that arrives in the tick in which
    the sending ends: about every second one, and a task that shall stop goes on for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    result = await command
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _entries_of(answer: Any) -> list[Any]:
    # RESP2 answers [[stream, entries]], RESP3 {stream: [entries]}.
    if not answer:
        return []
    if isinstance(answer, dict):
        (entries,) = answer.values()
        return entries[0] if entries and isinstance(entries[0], list) else entries
    return answer[0][1]


def _entry(cursor: bytes, fields: Mapping[bytes, bytes]) -> tuple[str, dict[str, str]]:
    return cursor.decode(), {key.decode(): value.decode() for key, value in fields.items()}
