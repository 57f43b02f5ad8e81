"""Several ranks publish one version: digests of the whole, handed over tensor by tensor, from who holds what."""

import asyncio
import os
from typing import Any

import grpc.aio
import pytest
import torch

from shared.config import WeightsConfig
from shared.failpoints import VARIABLE
from shared.gen.sextet.v1 import weights_pb2, weights_pb2_grpc
from shared.rpc.client import Connections
from shared.rpc.errors import FailedPrecondition, InvalidArgument, NotFound
from shared.rpc.interceptors import Guard
from shared.rpc.options import SERVER_OPTIONS
from shared.training.group import Group
from shared.weights.digest import state_digest
from shared.weights.gather import Gatherings
from shared.weights.grpc import GrpcPublisher, WeightsServicer
from shared.weights.join import LocalReceiver, join
from shared.weights.maker import MakerRanks
from shared.weights.part import WirePart
from tests.fakes.ranks import run_ranks

RUN, TOKEN = "r", "secret"
OPTIONS = WeightsConfig(channel="gloo", timeout=60)


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"even": (4, 6), "uneven": (5, 3), "one row": (1, 4), "flat": (7,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def publish_together(group: Group, job: dict[str, Any]) -> dict[str, Any]:
    """What a rank does in the test below."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (group.size,))
    publisher = GrpcPublisher(keep=1, ranks=MakerRanks(group))
    result: dict[str, Any] = {}

    def publish(version: int) -> weights_pb2.WeightsRef:
        shards: dict[str, torch.Tensor] = {}
        for name, tensor in state(version).items():
            shards[name] = distribute_tensor(tensor, mesh, [Shard(0)])
            assert isinstance(shards[name], DTensor)
        shards["tied"] = shards["even"]
        shards["buffer"] = torch.arange(3)
        return publisher.publish(version, shards, run=RUN, options=OPTIONS)

    result["digest"] = publish(1).digest
    old = publisher.held(RUN, 1)
    result["held"], result["whole"] = old.nbytes, old.whole_bytes
    if group.rank == 0:
        result["first"] = [tensor.tolist() for tensor in publisher.ranks.whole(RUN, old)]
    # As every command does: nobody goes on before the other.
    group.exchange("")
    ref = publish(2)
    if group.rank == 0:
        with pytest.raises(NotFound, match="rank 1 of the maker does not hold tensor 'even'"):
            next(publisher.ranks.whole(RUN, old))
        result["second"] = [tensor.tolist() for tensor in publisher.ranks.whole(RUN, publisher.held(RUN, 2))]
    for fails in (1, 0, None):
        os.environ[VARIABLE] = "weights.bucket.0=error" if group.rank == fails else ""
        group.exchange("")
        if group.rank == 0:
            result[f"{fails} fails"] = asyncio.run(take(publisher, ref, 2 if fails is None else 1))
        group.exchange("")
    return result


async def take(publisher: GrpcPublisher, ref: weights_pb2.WeightsRef, times: int) -> list[str]:
    """What a receiver says of transfers: the digest of what it has, or the error; and each one's group."""
    gatherings, receiver = Gatherings(ranks=publisher.ranks), LocalReceiver(WirePart("127.0.0.1"), torch.device("cpu"))
    server = grpc.aio.server(interceptors=[Guard(TOKEN)], options=SERVER_OPTIONS)
    weights_pb2_grpc.add_WeightsServiceServicer_to_server(WeightsServicer(publisher, gatherings), server)
    ref.endpoints[:] = [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"]
    await server.start()
    connections, said = Connections(TOKEN), []
    for number in range(times):
        together = weights_pb2.WeightsGathering(id=f"g{number}", members=["m"])
        try:
            await join(connections, ref, together, "m", receiver, 60)
            assert receiver.tensors is not None
            said.append(state_digest(receiver.tensors))
        except FailedPrecondition as error:
            said.append(str(error))
        said.append(receiver.holds)
    receiver._part.close()
    await gatherings.close()
    await connections.close()
    await server.stop(0)
    return said


def test_two_ranks_hold_halves_and_hand_over_whole_tensors() -> None:
    first, other = run_ranks("tests.unit.shared.weights.test_maker:publish_together", 2, {})
    expected = {**state(1), "tied": state(1)["even"], "buffer": torch.arange(3)}
    assert first["digest"] == other["digest"] == state_digest(expected)
    total = sum(tensor.nbytes for tensor in state(1).values())
    assert first["whole"] == total + 24
    assert first["held"] + other["held"] == total + 2 * 24, "each its half, and the buffer"
    for rank in (0, 1):
        error, held = first[f"{rank} fails"]
        assert "FailpointError" in error
        assert held == ""
    one, group, other, same = first["None fails"]
    assert one == other == state_digest({**state(2), "tied": state(2)["even"], "buffer": torch.arange(3)})
    assert group == same != "", "the second transfer had the first one's group"
    for version, name in ((1, "first"), (2, "second")):
        tensors = [*state(version).values(), torch.arange(3)]
        assert first[name] == [tensor.tolist() for tensor in tensors]


async def test_a_version_of_nobody_is_refused() -> None:
    receiver, connections = LocalReceiver(WirePart("127.0.0.1"), torch.device("cpu")), Connections(TOKEN)
    with pytest.raises(InvalidArgument, match="weights of version 1 name no endpoint"):
        await join(
            connections, weights_pb2.WeightsRef(run=RUN, version=1), weights_pb2.WeightsGathering(), "m", receiver, 1
        )
    await connections.close()
