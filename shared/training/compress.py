"""What a forward pass keeps for its backward pass, in 8 bits: a quarter of float32, half of bfloat16.

Each block of 256 elements is scaled by its largest magnitude (as in Dettmers et al. 2022, 8-bit optimizers), so an
element is off by at most 1/254 of that. Results stay exact; gradients are those of slightly other activations.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .regions import local

BLOCK = 256


@dataclass(frozen=True)
class Codes:
    """A tensor in 8 bits."""

    codes_GB: Tensor
    """int8 [groups, BLOCK]"""
    scales_G1: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor) -> "Codes":
        """Rounds to the nearest of 255 steps of each block."""
        flat = values.detach().reshape(-1)
        blocks_GB = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK).float()
        scales_G1 = blocks_GB.abs().amax(1, keepdim=True) / 127
        codes_GB = (blocks_GB / scales_G1.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return cls(codes_GB, scales_G1, values.dtype)

    def values(self, shape: Sequence[int]) -> Tensor:
        """The tensor again, contiguous."""
        flat = (self.codes_GB * self.scales_G1).to(self.dtype).view(-1)
        return flat[: torch.Size(shape).numel()].view(*shape)


@dataclass(frozen=True)
class Stored:
    """What stands for a saved tensor: its codes, its shape here and, where it is cut over ranks, how."""

    codes: Codes
    shape: torch.Size
    layout: tuple[Any, ...] | None

    def tensor(self) -> Tensor:
        part = self.codes.values(self.shape)
        if self.layout is None:
            return part
        mesh, placements, shape, stride = self.layout
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


@contextlib.contextmanager
def activations_in_8_bits(model: nn.Module, tokens: int, head_dim: int) -> Iterator[None]:
    """Large activations that operations inside save for their backward pass are stored in 8 bits.

    Left as they are: parameters and what is made of them (all that has a parameter's shape); masks, which are square
    and full of infinities; and whatever is not larger than a head's worth of `tokens`, such as softmax sums and rotary
    tables, whose errors would be multiplied.
    """
    weights = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    # A tensor that several operations save, or views of it, is stored once. A weak reference keeps its address taken.
    seen: dict[StorageWeakRef, dict[tuple[Any, ...], Codes]] = {}

    def store(tensor: Tensor) -> Tensor | Stored:
        part = local(tensor)
        square = part.ndim > 2 and part.shape[-1] == part.shape[-2]
        small = not part.is_floating_point() or part.numel() <= tokens * head_dim
        if small or square or tensor.shape in weights:
            return tensor
        layout = None
        if isinstance(tensor, DTensor):
            layout = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        order = part.numel() if part.is_contiguous() else (part.shape, part.stride())
        key = part.storage_offset(), order, part.dtype, part._version
        known = seen.setdefault(StorageWeakRef(part.untyped_storage()), {})
        if key not in known:
            known[key] = Codes.of(part)
        return Stored(known[key], part.shape, layout)

    def restore(kept: Tensor | Stored) -> Tensor:
        return kept.tensor() if isinstance(kept, Stored) else kept

    with torch.autograd.graph.saved_tensors_hooks(store, restore):
        yield
