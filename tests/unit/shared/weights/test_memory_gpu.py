"""Memory of a GPU that another process maps: pytest -m gpu tests/unit/shared/weights/test_memory_gpu.py"""

import multiprocessing

import pytest
import torch

from shared.gen.sextet.v1 import weights_pb2
from shared.weights.memory import device_name, map_memory, share_memory

MEBIBYTE = 1 << 20


def read(told: bytes, uuid: str, sums) -> None:
    """Maps it, sums it up and lets go of it."""
    sums.put(int(map_memory(weights_pb2.DeviceMemory.FromString(told), uuid).sum(dtype=torch.int64)))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("readers", [0, 1, 2])
def test_memory_is_free_again_when_its_maker_lets_go_of_it(readers):
    device = torch.device("cuda", 0)
    torch.ones(1, device=device)
    before = torch.cuda.memory_allocated(device)
    memory = torch.ones(64 * MEBIBYTE, dtype=torch.uint8, device=device)
    told = share_memory(memory).SerializeToString()
    spawn = multiprocessing.get_context("spawn")
    sums = spawn.Queue()
    for _ in range(readers):
        process = spawn.Process(target=read, args=(told, device_name(device), sums))
        process.start()
        assert sums.get(timeout=60) == 64 * MEBIBYTE
        process.join(60)
    del memory
    assert torch.cuda.memory_allocated(device) - before < MEBIBYTE
