"""Blocks to protobuf and back. Every byte received is covered by a digest before a block is made of it."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import xxhash

from shared.batch.block import Block, Ragged
from shared.batch.columns import Dtype
from shared.batch.refs import keys_of, messages_of
from shared.gen.sextet.v1 import batch_pb2

CHUNK = 1 << 20
"""Bytes: measured best on loopback; 256 KiB and 4 MiB are half as fast."""

_TYPES: dict[Dtype, batch_pb2.ElementType] = {
    "int32": batch_pb2.ELEMENT_TYPE_INT32,
    "float32": batch_pb2.ELEMENT_TYPE_FLOAT32,
    "uint8": batch_pb2.ELEMENT_TYPE_UINT8,
    "utf8": batch_pb2.ELEMENT_TYPE_UTF8,
}
_DTYPES: dict[int, tuple[str, bool]] = {
    batch_pb2.ELEMENT_TYPE_INT32: ("<i4", False),
    batch_pb2.ELEMENT_TYPE_FLOAT32: ("<f4", False),
    batch_pb2.ELEMENT_TYPE_UINT8: ("u1", False),
    batch_pb2.ELEMENT_TYPE_UTF8: ("u1", True),
}
ELEMENT_TYPES = frozenset(_DTYPES)


class Corrupt(ValueError):
    """What arrived is not what was sent."""


class TooLarge(ValueError):
    """More bytes than the reader takes."""


def block_ref(block: Block, *, endpoint: str, block_id: str, tokens: Sequence[int]) -> batch_pb2.BlockRef:
    """The ref to a block; its size depends on rows and columns only, never on their lengths."""
    if len(tokens) != len(block):
        raise ValueError(f"{len(tokens)} token counts for {len(block)} rows")
    return batch_pb2.BlockRef(
        endpoint=endpoint,
        block=block_id,
        columns=_columns(block),
        rows=messages_of(block.rows),
        tokens=tokens,
        bytes=block.nbytes,
        digest=block.digest(),
    )


def empty_column(dtype: int) -> Ragged:
    """A column without rows."""
    kind, text = _element(dtype)
    return Ragged(np.empty(0, kind), np.empty(0, np.uint32), text)


def header_of(block: Block) -> batch_pb2.ReadHeader:
    """What goes ahead of the block's data."""
    return batch_pb2.ReadHeader(
        rows=messages_of(block.rows),
        columns=[
            batch_pb2.ColumnHeader(
                column=batch_pb2.Column(name=name, dtype=_TYPES[c.dtype]), lengths=c.lengths.tolist()
            )
            for name, c in block.columns.items()
        ],
        bytes=sum(c.data.nbytes for c in block.columns.values()),
        digest=block.digest(),
    )


def chunks_of(buffers: Iterable[memoryview], size: int = CHUNK) -> Iterator[bytes]:
    """The buffers one after another, cut into pieces of `size` bytes (the last is shorter)."""
    pieces: list[memoryview] = []
    room = size
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            piece = buffer[start : start + room]
            pieces.append(piece)
            start += len(piece)
            room -= len(piece)
            if room == 0:
                yield b"".join(pieces)
                pieces, room = [], size
    if pieces:
        yield b"".join(pieces)


def messages(block: Block, header: batch_pb2.ReadHeader) -> Iterator[batch_pb2.ReadResponse]:
    """The stream: the header, then the data."""
    yield batch_pb2.ReadResponse(header=header)
    for chunk in chunks_of(block.buffers()):
        yield batch_pb2.ReadResponse(chunk=chunk, checksum=xxhash.xxh3_64_intdigest(chunk))


def to_bytes(block: Block) -> bytes:
    """A block as one piece, for `from_bytes`: the same messages, each after its length."""
    parts = []
    for message in messages(block, header_of(block)):
        content = message.SerializeToString()
        parts += [len(content).to_bytes(4, "little"), content]
    return b"".join(parts)


def from_bytes(data: bytes) -> Block:
    """The block that `to_bytes` wrote. Raises Corrupt."""
    assembler, place = Assembler(len(data)), 0
    while place < len(data):
        start = place + 4
        place = start + int.from_bytes(data[place:start], "little")
        assembler.add(batch_pb2.ReadResponse.FromString(data[start:place]))
    return assembler.finish()


class Assembler:
    """Makes a block of a stream's messages, in one preallocated buffer.

    Args:
        max_bytes: more data than this is refused before memory is taken.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._header: batch_pb2.ReadHeader | None = None
        self._buffer = np.empty(0, np.uint8)
        self._filled = 0

    @property
    def size(self) -> int:
        """Bytes announced; 0 before the header."""
        return self._buffer.size

    def add(self, message: batch_pb2.ReadResponse) -> None:
        """Raises Corrupt or TooLarge."""
        if self._header is None:
            self._start(message)
            return
        chunk = message.chunk
        if not chunk or xxhash.xxh3_64_intdigest(chunk) != message.checksum:
            raise Corrupt(f"the chunk at byte {self._filled} does not match its checksum")
        end = self._filled + len(chunk)
        if end > self._buffer.size:
            raise Corrupt(f"more data than the {self._buffer.size} bytes announced")
        self._buffer[self._filled : end] = np.frombuffer(chunk, np.uint8)
        self._filled = end

    def finish(self) -> Block:
        """The block, once the stream has ended. Raises Corrupt."""
        if self._header is None or self._filled != self._buffer.size:
            raise Corrupt(f"the stream ended after {self._filled} of {self._buffer.size} bytes")
        columns: dict[str, Ragged] = {}
        start = 0
        for header in self._header.columns:
            kind, text = _element(header.column.dtype)
            end = start + _size(header)
            lengths = np.array(header.lengths, np.uint32)
            columns[header.column.name] = Ragged(self._buffer[start:end].view(kind), lengths, text)
            start = end
        try:
            block = Block(tuple(keys_of(self._header.rows)), columns)
        except ValueError as error:
            raise Corrupt(str(error)) from None
        if block.digest() != self._header.digest:
            raise Corrupt(f"digest {block.digest()} of what arrived, {self._header.digest} announced")
        return block

    def _start(self, message: batch_pb2.ReadResponse) -> None:
        if message.WhichOneof("content") != "header":
            raise Corrupt("the stream does not begin with a header")
        header = message.header
        if header.bytes != sum(map(_size, header.columns)):
            raise Corrupt(f"the header announces {header.bytes} bytes, its columns {sum(map(_size, header.columns))}")
        if header.bytes > self._max_bytes:
            raise TooLarge(f"{header.bytes} bytes are announced, {self._max_bytes} are allowed")
        self._header = header
        self._buffer = np.empty(header.bytes, np.uint8)


def _columns(block: Block) -> list[batch_pb2.Column]:
    return [batch_pb2.Column(name=name, dtype=_TYPES[c.dtype]) for name, c in block.columns.items()]


def _element(dtype: int) -> tuple[str, bool]:
    if dtype not in _DTYPES:
        raise Corrupt(f"unknown element type {dtype}")
    return _DTYPES[dtype]


def _size(header: batch_pb2.ColumnHeader) -> int:
    return sum(header.lengths) * np.dtype(_element(header.column.dtype)[0]).itemsize
