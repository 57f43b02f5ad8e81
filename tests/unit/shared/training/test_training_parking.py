"""Leaving the GPU between steps: asked for where there is none, it is refused. What it moves: test_actor_gpu.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.actor.backends.torch import TorchActor
from shared.rpc.errors import InvalidArgument
from shared.training.parking import Parking
from shared.weights.grpc import GrpcPublisher
from tests.fakes.training import make_config


async def test_without_a_gpu_there_is_nothing_to_leave(tiny_llama: Path) -> None:
    actor = TorchActor(GrpcPublisher(), lambda: None)
    with pytest.raises(InvalidArgument, match=r"actor\.park needs one rank on a GPU"):
        await actor.configure(make_config(tiny_llama, "actor.park=true", "model.device=cpu"), "r", None)


class OnGpu:
    """Stands for a tensor on a GPU that has room for `room` of them."""

    shape, dtype, device, room = (1,), torch.float32, torch.device("cuda", 0), 2

    def __init__(self, is_cuda: bool = True) -> None:
        self.is_cuda = is_cuda

    @property
    def data(self) -> "OnGpu":
        return self

    @data.setter
    def data(self, other: "OnGpu") -> None:
        self.is_cuda = other.is_cuda

    def detach(self) -> "OnGpu":
        return self

    def copy_(self, other: Any, non_blocking: bool) -> None: ...

    def to(self, home: torch.device, non_blocking: bool) -> "OnGpu":
        if OnGpu.room == 0:
            raise torch.OutOfMemoryError("none left")
        OnGpu.room -= 1
        return OnGpu()


def test_what_does_not_come_back_as_a_whole_stays_away_as_a_whole(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    tensors, parking = [OnGpu() for _ in range(3)], object.__new__(Parking)
    parking._away, parking._places = [], {id(tensor): OnGpu(is_cuda=False) for tensor in tensors}
    monkeypatch.setattr(parking, "_tensors", lambda: tensors)
    parking.park()
    with pytest.raises(torch.OutOfMemoryError):
        parking.fetch()
    assert [tensor.is_cuda for tensor in tensors] == [False] * 3
    monkeypatch.setattr(OnGpu, "room", 3)
    parking.fetch()
    assert [tensor.is_cuda for tensor in tensors] == [True] * 3
    assert parking._away == []
