import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import psutil
import pytest
import torch

from shared.gen.sextet.v1 import weights_pb2, weights_pb2_grpc
from shared.rpc.client import Connections
from shared.rpc.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SextetError,
    Unavailable,
)
from shared.rpc.interceptors import Guard
from shared.rpc.options import SERVER_OPTIONS
from shared.weights.digest import state_digest
from shared.weights.grpc import GrpcFetcher, GrpcPublisher, WeightsServicer

torch.set_num_threads(1)
TOKEN = "secret"


class Holder:
    """A process that holds weights."""

    def __init__(self, servicer: type[WeightsServicer], keep: int) -> None:
        self.publisher = GrpcPublisher(keep=keep)
        self.servicer = servicer(self.publisher)
        self.server = grpc.aio.server(interceptors=[Guard(TOKEN)], options=SERVER_OPTIONS)

    async def start(self) -> "Holder":
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(self.servicer, self.server)
        self.publisher.endpoint = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        return self


@pytest.fixture
async def start() -> AsyncIterator[Any]:
    holders: list[Holder] = []

    async def make(servicer: type[WeightsServicer] = WeightsServicer, keep: int = 2) -> Holder:
        holders.append(await Holder(servicer, keep).start())
        return holders[-1]

    yield make
    for holder in holders:
        await holder.server.stop(0)


@pytest.fixture
async def fetcher() -> AsyncIterator[GrpcFetcher]:
    connections = Connections(TOKEN)
    yield GrpcFetcher(connections, unreachable_after=1.0)
    await connections.close()


def model(seed: int = 0, mebibytes: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    embed = torch.randn(1000, 64).bfloat16()
    return {"embed": embed, "layer": torch.randn(mebibytes << 18), "scale": torch.tensor(2.0), "head": embed}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and state_digest(a) == state_digest(b)


class Spoiling(WeightsServicer):
    """Spoils message `place` of the first `times` attempts."""

    place, times = 1, 1

    def __init__(self, publisher: GrpcPublisher) -> None:
        super().__init__(publisher)
        self.attempts = 0

    async def Fetch(self, request, context):
        self.attempts += 1
        number = 0
        async for message in super().Fetch(request, context):
            if self.attempts <= self.times and number == self.place:
                message = self.spoil(message)
            number += 1
            yield message

    def spoil(self, message: weights_pb2.FetchResponse) -> weights_pb2.FetchResponse:
        flipped = bytearray(message.chunk)
        flipped[100] ^= 1
        return weights_pb2.FetchResponse(chunk=bytes(flipped), checksum=message.checksum)


class Cutting(Spoiling):
    def spoil(self, message):
        raise Unavailable("cut")


class Slow(WeightsServicer):
    def __init__(self, publisher: GrpcPublisher) -> None:
        super().__init__(publisher)
        self.sending = asyncio.Event()

    async def Fetch(self, request, context):
        async for message in super().Fetch(request, context):
            await asyncio.sleep(0.3)
            yield message
            self.sending.set()


async def test_a_version_arrives_verified(start, fetcher):
    holder = await start()
    state = model()
    ref = holder.publisher.publish(7, state, run="r")
    assert (ref.run, ref.version, ref.channel, list(ref.endpoints)) == ("r", 7, "grpc", [holder.publisher.endpoint])
    received = await fetcher.fetch(ref, 10)
    assert same(received, state)
    assert state_digest(received) == ref.digest
    assert received["head"] is received["embed"]
    assert received["embed"].dtype == torch.bfloat16


async def test_training_goes_on_after_publishing(start, fetcher):
    holder = await start()
    state = model()
    before = {name: tensor.clone() for name, tensor in state.items()}
    ref = holder.publisher.publish(1, state, run="r")
    for tensor in state.values():
        tensor.add_(1)
    assert same(await fetcher.fetch(ref, 10), before)


async def test_two_replicas_fetch_at_the_same_time(start, fetcher):
    holder = await start()
    ref = holder.publisher.publish(1, model(), run="r")
    for received in await asyncio.gather(*(fetcher.fetch(ref, 10) for _ in range(3))):
        assert same(received, model())


async def test_only_the_latest_versions_are_kept(start, fetcher):
    holder = await start(keep=2)
    refs = [holder.publisher.publish(version, model(version), run="r") for version in (1, 2, 3)]
    assert holder.publisher.held_bytes == refs[1].bytes + refs[2].bytes
    with pytest.raises(NotFound, match=r"does not hold version 1 of run 'r'; it holds 2, 3"):
        await fetcher.fetch(refs[0], 10)
    for version in (2, 3):
        assert same(await fetcher.fetch(refs[version - 1], 10), model(version))
    holder.publisher.release("r")
    assert holder.publisher.held_bytes == 0
    with pytest.raises(NotFound, match="it holds none"):
        await fetcher.fetch(refs[2], 10)


async def test_a_version_dropped_while_it_is_sent_still_arrives(start, fetcher):
    holder = await start(Slow, keep=1)
    ref = holder.publisher.publish(1, model(), run="r")
    fetching = asyncio.create_task(fetcher.fetch(ref, 20))
    await asyncio.wait_for(holder.servicer.sending.wait(), 20)
    holder.publisher.publish(2, model(2), run="r")
    assert same(await fetching, model())


async def test_publishing_again_after_a_reset_replaces_the_version(start, fetcher):
    holder = await start()
    old = holder.publisher.publish(1, model(1), run="r")
    new = holder.publisher.publish(1, model(2), run="r")
    assert same(await fetcher.fetch(new, 10), model(2))
    with pytest.raises(Internal, match=f"not {old.digest}"):
        await fetcher.fetch(old, 10)
    assert holder.publisher.held_bytes == new.bytes


async def test_another_run_has_its_own_versions(start, fetcher):
    holder = await start()
    ref = holder.publisher.publish(1, model(1), run="a")
    ref.run = "b"
    with pytest.raises(NotFound, match="run 'b'"):
        await fetcher.fetch(ref, 10)


@pytest.mark.parametrize("place", range(5))
async def test_cut_at_any_message_the_fetch_starts_over(start, fetcher, monkeypatch, place):
    monkeypatch.setattr(Cutting, "place", place)
    holder = await start(Cutting)
    ref = holder.publisher.publish(1, model(), run="r")
    assert same(await fetcher.fetch(ref, 10), model())
    assert holder.servicer.attempts == 2


async def test_a_flipped_byte_is_fetched_again(start, fetcher):
    holder = await start(Spoiling)
    ref = holder.publisher.publish(1, model(), run="r")
    assert same(await fetcher.fetch(ref, 10), model())
    assert holder.servicer.attempts == 2


async def test_what_always_arrives_damaged_is_refused_and_the_tensor_named(start, fetcher, monkeypatch):
    monkeypatch.setattr(Spoiling, "times", 100)
    monkeypatch.setattr(Spoiling, "place", 3)
    holder = await start(Spoiling)
    ref = holder.publisher.publish(5, model(), run="r")
    with pytest.raises(Internal, match=f"version 5 from {holder.publisher.endpoint}: .*'layer'"):
        await fetcher.fetch(ref, 10)


async def test_a_damaged_first_holder_and_a_sound_second(start, fetcher, monkeypatch):
    monkeypatch.setattr(Spoiling, "times", 100)
    bad, good = await start(Spoiling), await start()
    ref = bad.publisher.publish(1, model(), run="r")
    ref.endpoints.extend(good.publisher.publish(1, model(), run="r").endpoints)
    assert same(await fetcher.fetch(ref, 10), model())
    assert bad.servicer.attempts == 1


async def test_a_dead_first_holder_and_a_living_second(start, fetcher):
    dead, alive = await start(), await start()
    ref = dead.publisher.publish(1, model(), run="r")
    ref.endpoints.extend(alive.publisher.publish(1, model(), run="r").endpoints)
    await dead.server.stop(0)
    began = time.monotonic()
    assert same(await fetcher.fetch(ref, 30), model())
    # A call that had waited for the dead one would have taken all of its seconds.
    assert time.monotonic() - began < 20


async def test_a_holder_that_dies_while_sending(start, fetcher):
    dying, alive = await start(Slow), await start()
    ref = dying.publisher.publish(1, model(), run="r")
    ref.endpoints.extend(alive.publisher.publish(1, model(), run="r").endpoints)
    fetching = asyncio.create_task(fetcher.fetch(ref, 30))
    await asyncio.wait_for(dying.servicer.sending.wait(), 30)
    await dying.server.stop(0)
    assert same(await fetching, model())


async def test_no_holder_alive_is_said_within_seconds(start, fetcher):
    dead = await start()
    ref = dead.publisher.publish(1, model(), run="r")
    await dead.server.stop(0)
    began = time.monotonic()
    with pytest.raises(Unavailable, match=f"{dead.publisher.endpoint} cannot be reached"):
        await fetcher.fetch(ref, 60)
    # A call that had waited for the dead one would have taken all of its seconds.
    assert time.monotonic() - began < 20


async def test_the_deadline_holds_over_all(start, fetcher):
    slow = await start(Slow)
    ref = slow.publisher.publish(1, model(), run="r")
    with pytest.raises(DeadlineExceeded, match=r"version 1 did not arrive within 0.5 s"):
        await fetcher.fetch(ref, 0.5)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        ref.endpoints[0] = f"127.0.0.1:{frozen.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(SextetError, match="cannot be reached"):
            await fetcher.fetch(ref, 2)
        assert time.monotonic() - began < 20


async def test_another_channel_and_no_endpoint_are_refused(start, fetcher):
    holder = await start()
    ref = holder.publisher.publish(1, model(), run="r")
    ref.channel = "nccl"
    with pytest.raises(InvalidArgument, match="'nccl'"):
        await fetcher.fetch(ref, 1)
    with pytest.raises(InvalidArgument, match="needs an endpoint"):
        await fetcher.fetch(weights_pb2.WeightsRef(channel="grpc"), 1)


async def test_more_than_allowed_is_refused(start):
    holder = await start()
    ref = holder.publisher.publish(1, model(), run="r")
    connections = Connections(TOKEN)
    with pytest.raises(ResourceExhausted, match=f"{ref.bytes} bytes, 1000 are allowed"):
        await GrpcFetcher(connections, max_bytes=1000).fetch(ref, 10)
    await connections.close()


async def test_memory_is_one_copy_on_each_side(start, fetcher):
    """Snapshot and received tensors, a few chunks between them; no whole message, no second buffer."""
    holder = await start()
    # gRPC itself holds up to 200 MiB on a busy machine.
    size = 384 << 20
    state = {"w": torch.ones(size // 4)}
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    ref = holder.publisher.publish(1, state, run="r")
    most = 0
    fetching = asyncio.create_task(fetcher.fetch(ref, 60))
    while not fetching.done():
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.005)
    assert torch.equal((await fetching)["w"], state["w"])
    assert most - before < 2.75 * size
