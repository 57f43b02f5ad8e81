"""Leaving the GPU between steps: asked for where there is none, it is refused. What it moves: test_actor_gpu.py."""

from pathlib import Path

import pytest

from services.actor.backends.torch import TorchActor
from shared.rpc.errors import InvalidArgument
from shared.weights.grpc import GrpcPublisher
from tests.fakes.training import make_config


async def test_without_a_gpu_there_is_nothing_to_leave(tiny_llama: Path) -> None:
    actor = TorchActor(GrpcPublisher(), lambda: None)
    with pytest.raises(InvalidArgument, match=r"actor\.park needs one rank on a GPU"):
        await actor.configure(make_config(tiny_llama, "actor.park=true", "model.device=cpu"), "r", None)
