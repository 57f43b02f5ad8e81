import asyncio
import socket
import time

import numpy as np
import pytest

from shared.batch import refs
from shared.batch.block import Block, Ragged, RowKey
from shared.batch.reader import BatchReader
from shared.batch.store import BatchStore, DataServicer
from shared.gen.sextet.v1 import batch_pb2
from shared.rpc.client import Connections
from shared.rpc.errors import (
    BatchLost,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from tests.fakes.blocks import samples, scores


def put(holder, block: Block, step: int = 1) -> batch_pb2.BlockRef:
    return holder.store.put(block, run="r", step=step, tokens=[1] * len(block))


def large(mebibytes: int, name: str = "x") -> Block:
    data = np.random.default_rng(0).integers(0, 255, mebibytes << 20)
    return Block((RowKey("p", 0),), {name: Ragged.from_rows([data], "uint8")})


class Recording(DataServicer):
    """Keeps what was asked and counts what was sent."""

    def __init__(self, store):
        super().__init__(store)
        self.requests: list[batch_pb2.ReadRequest] = []
        Recording.last = self
        self.sent = 0

    async def Read(self, request, context):
        self.requests.append(request)
        async for message in super().Read(request, context):
            self.sent += len(message.chunk)
            yield message


class Faulty(DataServicer):
    """Spoils the first `times` attempts."""

    times = 1
    attempts = 0

    def __init__(self, store):
        super().__init__(store)
        type(self).attempts = 0

    async def Read(self, request, context):
        type(self).attempts += 1
        spoil = self.attempts <= self.times
        number = 0
        async for message in super().Read(request, context):
            if spoil:
                message = self.spoil(message, number)
            number += 1
            yield message

    def spoil(self, message, number):
        raise NotImplementedError


class Flipping(Faulty):
    def spoil(self, message, number):
        if message.chunk:
            message.chunk = bytes([message.chunk[0] ^ 1]) + message.chunk[1:]
        return message


class Cutting(Faulty):
    def spoil(self, message, number):
        if number == 2:
            raise Unavailable("cut")
        return message


async def test_joins_blocks_of_several_processes(start, connections):
    first, second, third = await start(), await start(), await start()
    block = samples(8)
    half = (block.select(block.rows[:5]), block.select(block.rows[5:]))
    backwards = tuple(reversed(block.rows))
    ref = refs.merge(put(first, half[0]), put(second, half[1]), put(third, scores(backwards)))
    joined = await BatchReader(connections).read(ref, timeout=10)
    assert joined.rows == block.rows
    assert {name: joined[name] for name in block.columns} == block.columns
    assert joined["score"].data.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


async def test_rows_in_the_order_asked_for(start, connections):
    holder = await start()
    block = samples(6)
    wanted = [block.rows[i] for i in (4, 0, 3)]
    read = await BatchReader(connections).read(refs.merge(put(holder, block)), rows=wanted, timeout=10)
    assert read == block.select(wanted)


async def test_only_what_is_wanted_is_sent(start, connections):
    holder = await start(Recording)
    block = samples(8, 1000)
    ref = refs.select_rows(refs.merge(put(holder, block)), block.rows[2:4])
    read = await BatchReader(connections).read(ref, ["response_ids"], timeout=10)
    assert read == block.select(block.rows[2:4], ["response_ids"])
    assert Recording.last.sent == read["response_ids"].data.nbytes


async def test_blocks_without_wanted_rows_or_columns_are_not_asked(start, connections):
    holder = await start(Recording)
    block = samples(4)
    ref = refs.merge(put(holder, block), put(holder, scores(block.rows)))
    reader = BatchReader(connections)
    assert list((await reader.read(ref, ["score"], timeout=10)).columns) == ["score"]
    assert len(Recording.last.requests) == 1
    nothing = await reader.read(ref, rows=[], timeout=10)
    assert len(Recording.last.requests) == 1
    assert nothing == Block((), {**block.select([]).columns, "score": Ragged.from_rows([], "float32")})


async def test_own_blocks_take_no_wire(start, connections):
    holder = await start(Recording)
    block = samples(4)
    read = await BatchReader(connections, holder.store).read(refs.merge(put(holder, block)), timeout=10)
    assert read["response_ids"].data.base is not None
    assert read == block
    assert not Recording.last.requests


async def test_an_empty_block_is_read(start, connections):
    holder = await start()
    block = samples(0)
    assert await BatchReader(connections).read(refs.merge(put(holder, block)), timeout=10) == block


async def test_column_names_with_slashes(start, connections):
    holder = await start()
    block = scores(samples(4).rows, "score/format")
    assert await BatchReader(connections).read(refs.merge(put(holder, block)), ["score/format"], timeout=10) == block


async def test_join_errors_name_what_is_wrong(start, connections):
    holder = await start()
    rows = samples(4).rows
    reader = BatchReader(connections)
    whole, part = put(holder, scores(rows)), put(holder, scores(rows[:2], "score/format"))
    with pytest.raises(InvalidArgument, match=r"'score/format' is missing for 2 of 4 rows: 1:1:0#0, 1:1:0#1"):
        await reader.read(refs.merge(whole, part), timeout=10)
    both = batch_pb2.BatchRef(blocks=[whole, put(holder, scores(rows))])
    with pytest.raises(InvalidArgument, match="'score' of row 1:0:0#0 comes from two blocks"):
        await reader.read(both, timeout=10)
    with pytest.raises(InvalidArgument, match="no column 'scor'; did you mean 'score'"):
        await reader.read(refs.merge(whole), ["scor"], timeout=10)
    with pytest.raises(InvalidArgument, match="missing for 1 of 1 rows: zz#0"):
        await reader.read(refs.merge(whole), rows=[RowKey("zz", 0)], timeout=10)
    with pytest.raises(InvalidArgument, match="twice: 1:0:0#0"):
        await reader.read(refs.merge(whole), rows=[rows[0], rows[0]], timeout=10)


async def test_blocks_that_disagree_on_a_type_are_refused(start, connections):
    holder = await start()
    a = Block((RowKey("p", 0),), {"mine": Ragged.from_scalars([1], "int32")})
    b = Block((RowKey("p", 1),), {"mine": Ragged.from_scalars([1], "float32")})
    with pytest.raises(InvalidArgument, match="'mine' is int32 and float32"):
        await BatchReader(connections).read(refs.merge(put(holder, a), put(holder, b)), timeout=10)


@pytest.mark.parametrize("local", [False, True])
async def test_a_released_block_is_lost(start, connections, local):
    holder = await start()
    ref = put(holder, samples(2))
    holder.store.release("r", None)
    with pytest.raises(BatchLost, match=ref.block) as lost:
        await BatchReader(connections, holder.store if local else None).read(refs.merge(ref), timeout=10)
    assert lost.value.details == {"endpoint": ref.endpoint, "block": ref.block}


@pytest.mark.parametrize("known", [False, True])
async def test_what_a_process_held_is_lost_with_it_at_once(start, connections, known):
    """Found by the kill matrix: a critic waited five seconds for each block of an actor that had been killed."""
    holder = await start()
    ref, reader = put(holder, samples(2)), BatchReader(connections, unreachable_after=60)
    if known:
        await reader.read(refs.merge(ref), timeout=60)
    await holder.server.stop(0)
    with pytest.raises(BatchLost, match="nobody listens there any more") as lost:
        await asyncio.wait_for(reader.read(refs.merge(ref), timeout=60), 30)
    assert lost.value.details == {"endpoint": ref.endpoint, "block": ref.block}


async def test_an_endpoint_that_accepts_and_says_nothing_is_lost(connections):
    """A frozen process: its kernel still accepts."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        store = BatchStore(1 << 20, f"127.0.0.1:{frozen.getsockname()[1]}")
        ref = store.put(samples(2), run="r", step=1, tokens=[1, 1])
        with pytest.raises(BatchLost, match="no connection within 1 s"):
            await BatchReader(connections, unreachable_after=1).read(refs.merge(ref), timeout=60)


class Slow(DataServicer):
    """Waits before every message, and counts the streams that run at the same time."""

    seconds = 0.2
    running = most = 0

    async def Read(self, request, context):
        Slow.running += 1
        Slow.most = max(Slow.most, Slow.running)
        try:
            async for message in super().Read(request, context):
                await asyncio.sleep(self.seconds)
                yield message
        finally:
            Slow.running -= 1


def row(number: int, mebibytes: int) -> Block:
    """One row of its own."""
    return Block((RowKey(f"p{number}", 0),), large(mebibytes).columns)


async def test_one_lost_block_ends_the_whole_read_at_once(start, connections, monkeypatch):
    monkeypatch.setattr(Slow, "seconds", 2)
    holder, slow = await start(), await start(Slow)
    ref = refs.merge(put(slow, row(0, 20)), put(holder, row(1, 1)))
    holder.store.release("r", None)
    began = time.monotonic()
    with pytest.raises(BatchLost):
        await BatchReader(connections).read(ref, timeout=60)
    assert time.monotonic() - began < 20
    for _ in range(400):
        if Slow.running == 0:
            break
        await asyncio.sleep(0.05)
    assert Slow.running == 0, "the stream that is no longer wanted goes on"


async def test_blocks_are_read_at_the_same_time_but_not_all(start, connections):
    slow = await start(Slow)
    Slow.most = 0
    ref = refs.merge(*(put(slow, row(number, 1)) for number in range(6)))
    await BatchReader(connections, streams=3).read(ref, timeout=30)
    assert Slow.most == 3


async def test_the_deadline_ends_a_slow_read(start, connections):
    slow = await start(Slow)
    ref = put(slow, row(0, 20))
    with pytest.raises(DeadlineExceeded, match=ref.block):
        await BatchReader(connections).read(refs.merge(ref), timeout=0.5)


@pytest.mark.parametrize("servicer", [Flipping, Cutting])
async def test_a_spoiled_stream_is_read_again(start, connections, servicer):
    holder = await start(servicer)
    block = large(3)
    assert await BatchReader(connections).read(refs.merge(put(holder, block)), timeout=10) == block
    assert servicer.attempts == 2


async def test_a_cut_at_any_message_is_read_again(start, connections):
    block = large(3)
    for place in range(4):

        class Cut(Faulty):
            def spoil(self, message, number, place=place):
                if number == place:
                    raise Unavailable("cut")
                return message

        holder = await start(Cut)
        assert await BatchReader(connections).read(refs.merge(put(holder, block)), timeout=10) == block


async def test_a_block_that_always_arrives_corrupt_is_refused(start, connections, monkeypatch):
    monkeypatch.setattr(Flipping, "times", 100)
    holder = await start(Flipping)
    ref = put(holder, large(1))
    with pytest.raises(Internal, match=f"{ref.block}.*3 attempts.*does not match its checksum"):
        await BatchReader(connections).read(refs.merge(ref), timeout=10)


async def test_other_rows_than_asked_for_are_refused(start, connections):
    class Wrong(DataServicer):
        async def Read(self, request, context):
            del request.rows[:]
            async for message in super().Read(request, context):
                yield message

    holder = await start(Wrong)
    block = samples(4)
    ref = refs.select_rows(put(holder, block), block.rows[:1])
    with pytest.raises(Internal, match="other rows or columns"):
        await BatchReader(connections).read(ref, timeout=10)


async def test_a_restarted_holder_has_lost_its_blocks(start, connections):
    holder = await start()
    ref = put(holder, samples(2))
    await holder.server.stop(0)
    again = await start(port=int(ref.endpoint.rpartition(":")[2]))
    put(again, samples(2))
    with pytest.raises(BatchLost):
        await BatchReader(connections).read(refs.merge(ref), timeout=10)


async def test_more_than_the_limit_is_refused_over_all_blocks(start, connections):
    holder = await start()
    ref = refs.merge(*(put(holder, row(number, 2)) for number in range(3)))
    reader = BatchReader(connections, max_bytes=5 << 20)
    with pytest.raises(ResourceExhausted, match=f"{5 << 20} bytes"):
        await reader.read(ref, timeout=10)
    two = refs.select_rows(ref, refs.row_keys(ref)[:2])
    assert len(await reader.read(two, timeout=10)) == 2


async def test_a_wrong_token_is_said_at_once(start):
    holder = await start()
    ref = put(holder, samples(2))
    wrong = Connections("wrong")
    with pytest.raises(Unauthenticated, match="SEXTET_TOKEN"):
        await BatchReader(wrong).read(refs.merge(ref), timeout=10)
    await wrong.close()
