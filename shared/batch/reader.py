"""Reads batches by reference: straight from the processes that hold the blocks, checked, joined by row key."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from shared.batch import codec
from shared.batch.block import Block
from shared.batch.columns import RowKey
from shared.batch.join import Part, join, plan
from shared.batch.refs import messages_of
from shared.batch.store import BatchStore
from shared.gen.sextet.v1 import batch_pb2, batch_pb2_grpc
from shared.rpc.client import Connections, stream
from shared.rpc.errors import (
    BatchLost,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SextetError,
)

T = TypeVar("T")

_CORRUPT_ATTEMPTS = 3


class BatchReader:
    """Reads what a BatchRef names.

    Args:
        connections: channels to the other processes.
        store: this process's own blocks; they are read without a wire.
        max_bytes: data of one batch; more is refused before memory is taken.
        streams: blocks read at the same time.
        unreachable_after: seconds after which an endpoint without a connection counts as dead.
    """

    def __init__(
        self,
        connections: Connections,
        store: BatchStore | None = None,
        *,
        max_bytes: int = 4 << 30,
        streams: int = 4,
        unreachable_after: float = 5.0,
    ) -> None:
        self._connections = connections
        self._store = store
        self._max_bytes = max_bytes
        self._unreachable_after = unreachable_after
        self._streams = asyncio.Semaphore(streams)

    async def read(
        self,
        ref: batch_pb2.BatchRef,
        columns: Sequence[str] | None = None,
        *,
        rows: Sequence[RowKey] | None = None,
        timeout: float,
    ) -> Block:
        """One block with these columns and rows (None: all), joined by row key.

        Rows come in the order given, else in the order in which the ref's blocks first name them. Only what is wanted
        is sent. Transient failures are tried again until the timeout (seconds).

        Raises:
            InvalidArgument: naming rows or columns that are missing, doubled, or come from two blocks.
            BatchLost: a block is gone, or its endpoint dead; details endpoint and block.
            ResourceExhausted: more than max_bytes.
            DeadlineExceeded, Internal: naming endpoint and block.
        """
        wanted = plan(ref, columns, rows)
        read = _Read(self._max_bytes, time.monotonic() + timeout)
        blocks = await _all([self._part(part, read) for part in wanted.parts])
        return await asyncio.to_thread(join, wanted, blocks)

    async def _part(self, part: Part, read: "_Read") -> Block:
        try:
            async with asyncio.timeout(read.remaining()):
                if self._store is not None and part.ref.endpoint == self._store.endpoint:
                    return await self._local(part, self._store)
                async with self._streams:
                    return await self._remote(part, read)
        except TimeoutError:
            raise DeadlineExceeded(f"reading {_name(part)} took longer than the deadline allows") from None

    async def _local(self, part: Part, store: BatchStore) -> Block:
        try:
            return await asyncio.to_thread(store.get(part.ref.block).select, part.rows, part.columns)
        except NotFound as error:
            raise _lost(part, str(error)) from None
        except KeyError as error:
            raise InvalidArgument(f"{_name(part)}: {error.args[0]}") from None

    async def _remote(self, part: Part, read: "_Read") -> Block:
        corrupt = 0
        pause = 0.05
        while True:
            await self._reach(part)
            try:
                return await self._attempt(part, read)
            except (codec.Corrupt, Internal) as error:
                corrupt += 1
                if corrupt == _CORRUPT_ATTEMPTS:
                    raise Internal(f"{_name(part)} could not be read in {corrupt} attempts: {error}") from None
            except codec.TooLarge as error:
                raise ResourceExhausted(f"{_name(part)}: {error}") from None
            except NotFound as error:
                raise _lost(part, str(error)) from None
            except SextetError as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _reach(self, part: Part) -> None:
        if why := await self._connections.unreachable(part.ref.endpoint, self._unreachable_after):
            raise _lost(part, why)

    async def _attempt(self, part: Part, read: "_Read") -> Block:
        stub = batch_pb2_grpc.DataServiceStub(self._connections.channel(part.ref.endpoint))
        request = batch_pb2.ReadRequest(block=part.ref.block, columns=part.columns, rows=messages_of(part.rows))
        assembler = codec.Assembler(self._max_bytes)
        async with aclosing(stream(stub.Read, request, timeout=read.remaining())) as messages:
            async for message in messages:
                assembler.add(message)
                read.claim(part, assembler.size)
        block = await asyncio.to_thread(assembler.finish)
        if block.rows != part.rows or tuple(block.columns) != part.columns:
            raise codec.Corrupt("it holds other rows or columns than asked for")
        return block


class _Read:
    """One batch on its way: its deadline, and the bytes that its parts have announced."""

    def __init__(self, max_bytes: int, deadline: float) -> None:
        self._max_bytes = max_bytes
        self._deadline = deadline
        self._claims: dict[int, int] = {}

    def remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def claim(self, part: Part, size: int) -> None:
        self._claims[id(part)] = size
        if sum(self._claims.values()) > self._max_bytes:
            raise codec.TooLarge(f"the batch is larger than the {self._max_bytes} bytes allowed")


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all; the first failure ends the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _name(part: Part) -> str:
    return f"block {part.ref.block!r} on {part.ref.endpoint}"


def _lost(part: Part, why: str) -> BatchLost:
    return BatchLost(f"{_name(part)} is lost: {why}", endpoint=part.ref.endpoint, block=part.ref.block)
