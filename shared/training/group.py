"""The ranks of one replica: what they tell each other beside their tensors, as bytes and JSON over a gloo group."""

import datetime
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

IDLE = datetime.timedelta(days=365)
"""Ranks wait for the next command as long as it takes; whether rank 0 is alive, the watch knows (see spmd.py)."""


class Group:
    """The processes that are one replica together; alone, it is this process.

    Args:
        control: a gloo group over all ranks, for commands and small results; set when they are all there.

    Attributes:
        waited: seconds in which this rank has been waiting for what the others tell.
    """

    def __init__(self, rank: int = 0, size: int = 1, control: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = rank, size
        self.control: dist.ProcessGroup | None = control
        self.waited = 0.0

    def beside(self) -> "Group":
        """The same ranks, for commands beside the present ones, which may take long. Made by all ranks together."""
        control: Any = dist.new_group(backend="gloo", timeout=IDLE)
        return Group(self.rank, self.size, control)

    def broadcast(self, data: bytes = b"") -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self.control)
        content = _tensor(data) if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, 0, group=self.control)
        return content.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank, in order of rank."""
        if self.size == 1:
            return [data]
        began = time.perf_counter()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.control)
        longest = max(int(length) for length in lengths)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.cat([_tensor(data), torch.zeros(longest - len(data), dtype=torch.uint8)]),
                        group=self.control)  # fmt: skip
        self.waited += time.perf_counter() - began
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's JSON value, on every rank, in order of rank; floats keep their bits, NaN and infinity too."""
        if self.size == 1:
            return [value]
        return [json.loads(part) for part in self.gather(json.dumps(value).encode())]


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


ALONE = Group()
