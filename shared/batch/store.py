"""The blocks this process made, kept until their step is released, and the service that others read them from."""

import asyncio
import itertools
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from shared.batch import codec
from shared.batch.block import Block
from shared.batch.refs import keys_of
from shared.failpoints import hit_async
from shared.gen.sextet.v1 import batch_pb2, batch_pb2_grpc
from shared.rpc.errors import InvalidArgument, NotFound, ResourceExhausted


@dataclass(frozen=True)
class _Held:
    block: Block
    run: str
    step: int


class BatchStore:
    """Blocks by id, bounded in bytes. Safe to use from several threads.

    Args:
        max_bytes: a block that would exceed this is refused.
        endpoint: host:port of this process's DataService; set once it is bound.
    """

    def __init__(self, max_bytes: int, endpoint: str = "") -> None:
        self.endpoint = endpoint
        self._max_bytes = max_bytes
        self._held: dict[str, _Held] = {}
        self._held_bytes = 0
        self._lock = threading.Lock()
        # A restarted process must not answer for a block of its former self on the same port.
        self._incarnation = secrets.token_hex(4)
        self._counter = itertools.count(1)

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def put(self, block: Block, *, run: str, step: int, tokens: Sequence[int]) -> batch_pb2.BlockRef:
        """Keeps a block.

        Args:
            block: kept as it is, not copied.
            run, step: what made it; `release` frees by them.
            tokens: [rows] prompt and response tokens, for balancing.

        Raises:
            ResourceExhausted: the block does not fit.
        """
        block_id = f"{self._incarnation}-{next(self._counter)}"
        ref = codec.block_ref(block, endpoint=self.endpoint, block_id=block_id, tokens=tokens)
        with self._lock:
            if self._held_bytes + block.nbytes > self._max_bytes:
                raise ResourceExhausted(
                    f"a block of {block.nbytes} bytes does not fit: {self._held_bytes} of {self._max_bytes} bytes are "
                    "held; raise max_held_bytes, lower data.batch_size, or add replicas"
                )
            self._held[block_id] = _Held(block, run, step)
            self._held_bytes += block.nbytes
        return ref

    def get(self, block_id: str) -> Block:
        """Raises NotFound: released, or made by an earlier process."""
        held = self._held.get(block_id)
        if held is None:
            raise NotFound(f"block {block_id!r} is not held by {self.endpoint or 'this process'}", block=block_id)
        return held.block

    def release(self, run: str, up_to_step: int | None) -> int:
        """Frees a run's blocks of steps up to and including this one; None: all. Returns the bytes freed."""
        with self._lock:
            gone = [
                block_id
                for block_id, held in self._held.items()
                if held.run == run and (up_to_step is None or held.step <= up_to_step)
            ]
            freed = sum(self._held.pop(block_id).block.nbytes for block_id in gone)
            self._held_bytes -= freed
        return freed


class DataServicer(batch_pb2_grpc.DataServiceServicer):
    """Streams rows and columns of the store's blocks."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store

    async def Read(self, request: batch_pb2.ReadRequest, context: Any) -> AsyncIterator[batch_pb2.ReadResponse]:
        block = self._store.get(request.block)
        rows = keys_of(request.rows) if request.rows else None
        try:
            # Copying and hashing a large block takes longer than the event loop may be held.
            selected = await asyncio.to_thread(block.select, rows, list(request.columns) or None)
            header = await asyncio.to_thread(codec.header_of, selected)
        except (KeyError, ValueError) as error:
            raise InvalidArgument(f"block {request.block!r}: {error.args[0]}") from None
        for message in codec.messages(selected, header):
            yield message
            await hit_async("data.sent")
