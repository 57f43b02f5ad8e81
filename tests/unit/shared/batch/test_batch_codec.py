import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from shared.batch import codec
from shared.batch.block import Block, Ragged, RowKey
from shared.gen.sextet.v1 import batch_pb2
from tests.fakes.blocks import blocks, samples

ROOM = 1 << 30


def wire(block: Block) -> list[bytes]:
    return [message.SerializeToString() for message in codec.messages(block, codec.header_of(block))]


def assemble(messages: list[bytes], max_bytes: int = ROOM) -> Block:
    assembler = codec.Assembler(max_bytes)
    for message in messages:
        assembler.add(batch_pb2.ReadResponse.FromString(message))
    return assembler.finish()


@given(blocks())
def test_round_trip(block):
    """Random ragged blocks: empty rows, no rows, no columns, any text, NaN."""
    received = assemble(wire(block))
    assert received == block
    assert list(received.columns) == list(block.columns)
    assert received.digest() == block.digest()


@given(blocks(), st.data())
def test_a_flipped_bit_is_never_taken_for_the_block(block, data):
    messages = wire(block)
    which = data.draw(st.integers(0, len(messages) - 1))
    place = data.draw(st.integers(0, 8 * len(messages[which]) - 1))
    assert_refused(block, messages, which, place // 8, 1 << place % 8)


def test_any_flipped_byte_is_refused():
    block = samples(3, 2)
    messages = wire(block)
    for which, message in enumerate(messages):
        for place in range(len(message)):
            assert_refused(block, messages, which, place, 0xFF)


def assert_refused(block: Block, messages: list[bytes], which: int, place: int, flip: int) -> None:
    damaged = bytearray(messages[which])
    damaged[place] ^= flip
    try:
        received = assemble([*messages[:which], bytes(damaged), *messages[which + 1 :]])
    except (codec.Corrupt, codec.TooLarge, DecodeError):
        return
    # Some bits carry nothing: a field's number turned into an unknown one that repeats a default.
    assert received == block


def test_cut_short_doubled_and_reordered_streams_are_refused():
    block = Block((RowKey("p", 0),), {"x": Ragged.from_rows([np.arange(700_000)], "int32")})
    header, *chunks = wire(block)
    assert len(chunks) == 3
    assert assemble([header, *chunks]) == block
    for count in range(len(chunks)):
        with pytest.raises(codec.Corrupt, match="ended after"):
            assemble([header, *chunks[:count]])
    with pytest.raises(codec.Corrupt, match="more data"):
        assemble([header, *chunks, chunks[-1]])
    with pytest.raises(codec.Corrupt, match="digest"):
        assemble([header, chunks[1], chunks[0], chunks[2]])
    with pytest.raises(codec.Corrupt, match="does not begin with a header"):
        assemble([*chunks])
    with pytest.raises(codec.Corrupt, match="ended"):
        assemble([])


def test_too_much_is_refused_at_the_header():
    block = samples(4, 1000)
    announced = codec.header_of(block).bytes
    assert assemble(wire(block), announced) == block
    with pytest.raises(codec.TooLarge, match=f"{announced} bytes are announced, {announced - 1} are allowed"):
        assemble(wire(block)[:1], announced - 1)


def test_a_header_that_promises_more_than_its_columns_is_refused():
    header = codec.header_of(samples(1))
    header.bytes = 1 << 40
    with pytest.raises(codec.Corrupt, match="announces 1099511627776 bytes"):
        codec.Assembler(ROOM).add(batch_pb2.ReadResponse(header=header))


def test_an_unknown_element_type_is_refused():
    header = codec.header_of(samples(1))
    header.columns[0].column.dtype = 0
    with pytest.raises(codec.Corrupt, match="element type 0"):
        codec.Assembler(ROOM).add(batch_pb2.ReadResponse(header=header))


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(1, 7))
def test_chunks_are_the_buffers_cut_at_equal_size(buffers, size):
    chunks = list(codec.chunks_of([memoryview(buffer) for buffer in buffers], size))
    assert b"".join(chunks) == b"".join(buffers)
    assert all(len(chunk) == size for chunk in chunks[:-1])
    assert all(1 <= len(chunk) <= size for chunk in chunks[-1:])
