"""Members of a gathering take versions over gloo: fresh groups, damage, cuts, who comes late or never."""

import asyncio
import gc
import time
import weakref
from typing import Any

import grpc.aio
import pytest
import torch

from shared.config import WeightsConfig
from shared.gen.sextet.v1 import weights_pb2, weights_pb2_grpc
from shared.rpc.client import Connections
from shared.rpc.errors import FailedPrecondition, Internal, InvalidArgument
from shared.rpc.interceptors import Guard
from shared.rpc.options import SERVER_OPTIONS
from shared.weights import gather
from shared.weights.digest import state_digest
from shared.weights.gather import Gatherings
from shared.weights.grpc import GrpcPublisher, WeightsServicer
from shared.weights.join import LocalReceiver, join
from shared.weights.part import WirePart
from tests.unit.shared.weights.test_wire import CPU, HOST, model, parts

__all__ = ["parts"]

TOKEN = "secret"


class Maker:
    """The actor's side."""

    def __init__(self) -> None:
        self.publisher = GrpcPublisher()
        self.server = grpc.aio.server(interceptors=[Guard(TOKEN)], options=SERVER_OPTIONS)
        servicer = WeightsServicer(self.publisher, Gatherings(HOST))
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(servicer, self.server)
        self.publisher.endpoint = f"{HOST}:{self.server.add_insecure_port(f'{HOST}:0')}"

    def publish(self, version: int, state: dict[str, torch.Tensor], channel: str = "gloo", **options: Any):
        config = WeightsConfig(channel=channel, timeout=20, **options)
        return self.publisher.publish(version, state, run="r", options=config)


@pytest.fixture
async def maker():
    made = Maker()
    await made.server.start()
    yield made
    await made.server.stop(0)


@pytest.fixture
async def connections():
    made = Connections(TOKEN)
    yield made
    await made.close()


def members(count: int) -> dict[str, LocalReceiver]:
    return {f"m{n}": LocalReceiver(WirePart(HOST), CPU) for n in range(count)}


async def take(connections, ref, receivers, gathering: str = "", asked: tuple[str, ...] = ()) -> list[Any]:
    message = weights_pb2.WeightsGathering(id=gathering or f"g{time.monotonic_ns()}", members=asked or list(receivers))
    outcomes = await asyncio.gather(
        *(join(connections, ref, message, name, receiver, 30) for name, receiver in receivers.items()),
        return_exceptions=True,
    )
    return [outcome if isinstance(outcome, BaseException) else None for outcome in outcomes]


async def test_all_members_get_a_version_verified_and_the_group_stays(maker, connections):
    receivers = members(3)
    for version in range(1, 5):
        state = model(version)
        ref = maker.publish(version, state)
        assert list(ref.offers) == ["gloo"]
        assert await take(connections, ref, receivers) == [None] * 3
        for receiver in receivers.values():
            assert state_digest(receiver.tensors) == ref.digest
            assert receiver.tensors["head"] is receiver.tensors["embed"]
        groups = {receiver.holds for receiver in receivers.values()}
        assert len(groups) == 1
        if version == 1:
            first = groups
    assert groups == first


async def test_a_receiver_without_memory_says_so_to_all_and_keeps_none(maker, connections, monkeypatch):
    receivers = members(2)
    assert await take(connections, maker.publish(1, model(1)), receivers) == [None] * 2
    held, began = [], time.monotonic()

    def none_left(*args: Any) -> Any:
        tensor = torch.ones(3)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("none left")

    gc.collect()
    gc.disable()
    monkeypatch.setattr("shared.weights.part._buffers", none_left)
    try:
        for outcome in await take(connections, maker.publish(2, model(2)), receivers):
            assert isinstance(outcome, FailedPrecondition)
            assert "OutOfMemoryError: none left" in str(outcome)
        del outcome
        assert time.monotonic() - began < 10
        # The loop's present callback holds on to what it was called with.
        await asyncio.sleep(0.05)
        assert not [each for each in held if each() is not None]
    finally:
        gc.enable()
    monkeypatch.undo()
    assert await take(connections, maker.publish(3, model(3)), receivers) == [None] * 2


async def test_after_a_restart_on_either_side_there_is_a_fresh_group(maker, connections):
    receivers = members(2)
    assert await take(connections, maker.publish(1, model(1)), receivers) == [None, None]
    before = receivers["m0"].holds
    receivers["m1"] = LocalReceiver(WirePart(HOST), CPU)
    ref = maker.publish(2, model(2))
    assert await take(connections, ref, receivers) == [None, None]
    assert receivers["m0"].holds == receivers["m1"].holds != before
    again = Maker()
    await again.server.start()
    ref = again.publish(3, model(3))
    assert await take(connections, ref, receivers) == [None, None]
    assert state_digest(receivers["m0"].tensors) == ref.digest
    await again.server.stop(0)


async def test_a_member_that_comes_late_hears_that_the_others_went_on(maker, connections, monkeypatch):
    monkeypatch.setattr(gather, "PATIENCE_SECONDS", 0.5)
    receivers, ref = members(2), maker.publish(1, model())
    late = {"m1": receivers.pop("m1")}
    assert await take(connections, ref, receivers, "g", ("m0", "m1")) == [None]
    [error] = await take(connections, ref, late, "g", ("m0", "m1"))
    assert isinstance(error, FailedPrecondition)
    assert "went on without 'm1'" in str(error)
    [error] = await take(connections, ref, {"m9": late["m1"]}, "h", ("m0",))
    assert isinstance(error, InvalidArgument)


async def test_who_cannot_use_the_channel_holds_up_nobody(maker, connections):
    class OnlyGrpc(LocalReceiver):
        @property
        def channels(self):
            return []

    receivers = members(1) | {"x": OnlyGrpc(WirePart(HOST), CPU)}
    began = time.monotonic()
    done, refused = await take(connections, maker.publish(1, model()), receivers)
    assert done is None
    assert "'x' can use grpc" in str(refused)
    assert time.monotonic() - began < 15


async def test_damage_on_the_way_is_found_and_the_tensor_named(maker, connections, monkeypatch):
    from shared.weights import wire

    def spoiled(schedule, group, local, deadline, run=wire.run):
        run(schedule, group, local, deadline)
        if group.rank == 1:
            local["o"].view(torch.int32)[3, 3] ^= 1

    monkeypatch.setattr("shared.weights.part.run", spoiled)
    error, good = await take(connections, maker.publish(1, model()), members(2))
    assert isinstance(error, Internal)
    assert "tensor 'o' has digest" in str(error)
    assert good is None


async def test_a_tensor_that_the_actor_lacks_is_named(maker, connections):
    class Wanting(LocalReceiver):
        def ranks(self):
            [rank] = super().ranks()
            rank.pieces.add(tensor="other", start=[0], size=[3])
            return [rank]

    [error] = await take(connections, maker.publish(1, model()), {"m": Wanting(WirePart(HOST), CPU)})
    assert isinstance(error, FailedPrecondition)
    assert "'other'" in str(error)


async def test_cut_at_every_bucket_then_whole_again(maker, connections, monkeypatch):
    """Either side raises at any bucket: an error with the cause on both sides, then a fresh group brings it all."""
    receivers = members(2)
    state = model(rows=60_000)
    for place in range(5):
        version = place + 1
        ref = maker.publish(version, state, bucket_mib=1)
        monkeypatch.setenv("SEXTET_FAILPOINTS", f"weights.bucket.{place}=error")
        outcomes = await take(connections, ref, receivers)
        monkeypatch.setenv("SEXTET_FAILPOINTS", "")
        if all(outcome is None for outcome in outcomes):
            assert place > 0, "there is a first bucket"
            break
        for outcome in outcomes:
            assert isinstance(outcome, FailedPrecondition)
            assert "FailpointError" in str(outcome), outcomes
        assert await take(connections, ref, receivers) == [None, None]
        assert state_digest(receivers["m1"].tensors) == ref.digest


async def test_two_hundred_versions_leave_nothing_behind(maker, connections):
    import gc

    import psutil

    receivers, process = members(1), psutil.Process()
    state = model(rows=6000)
    for version in range(1, 201):
        ref = maker.publish(version, state)
        assert await take(connections, ref, receivers) == [None]
        if version == 20:
            gc.collect()
            memory, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
    gc.collect()
    # Pools of threads grow with what waits for them, on a busy machine later than here; 180 versions would leave more.
    assert process.num_fds() <= files + 10
    assert process.num_threads() <= threads + 10
    assert process.memory_info().rss < memory + (30 << 20)
