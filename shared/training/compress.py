"""What a forward pass keeps for its backward pass, in 8 bits: a quarter of float32, half of bfloat16.

Each block of 256 elements is scaled by its largest magnitude (as in Dettmers et al. 2022, 8-bit optimizers), so an
element is off by at most 1/254 of that. Results stay exact; gradients are those of slightly other activations.
"""

import contextlib
import functools
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
        if missing := -flat.numel() % BLOCK:
            flat = F.pad(flat, (0, missing))
        blocks_GB = flat.view(-1, BLOCK)
        largest_G1 = blocks_GB.abs().amax(1, keepdim=True).float()
        # One operation scales and rounds, as float16 has no fractions here. Its last byte is the step as int8; where a
        # block has nothing but zeros, or something that is not finite, any will do.
        rounded_GB = torch.empty_like(blocks_GB, dtype=torch.float16)
        torch.addcdiv(_middle(flat.device), blocks_GB, largest_G1, value=127, out=rounded_GB)
        return cls(rounded_GB.view(torch.int16).to(torch.int8), largest_G1.div_(127), values.dtype)

    def values(self, shape: Sequence[int]) -> Tensor:
        """The tensor again, contiguous."""
        blocks_GB = torch.empty_like(self.codes_GB, dtype=self.dtype)
        flat = torch.mul(self.codes_GB, self.scales_G1, out=blocks_GB).view(-1)
        return flat[: torch.Size(shape).numel()].view(*shape)


@functools.cache
def _middle(device: torch.device) -> Tensor:
    """A multiple of 256 in the middle of the float16 numbers whose last bit is 1."""
    return torch.tensor(1536.0, device=device)


@dataclass(frozen=True)
class Stored:
    """What stands for a saved tensor: its codes, how it lies in memory and, where it is cut over ranks, how."""

    codes: Codes
    shape: torch.Size
    """Here, with dimensions in the order in which they lie."""
    order: list[int]
    """For each dimension of the tensor, its place in `shape`."""
    layout: tuple[Any, ...] | None

    def tensor(self) -> Tensor:
        part = self.codes.values(self.shape).permute(self.order)
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
        # As it lies in memory: views that are nothing but other orders of its dimensions are one tensor.
        outwards = sorted(range(part.ndim), key=part.stride, reverse=True)
        lying = part.permute(outwards)
        extent = lying.numel() if lying.is_contiguous() else (lying.shape, lying.stride())
        key = part.storage_offset(), extent, part.dtype, part._version
        known = seen.setdefault(StorageWeakRef(part.untyped_storage()), {})
        if key not in known:
            known[key] = Codes.of(lying)
        return Stored(known[key], lying.shape, sorted(range(part.ndim), key=outwards.__getitem__), layout)

    def restore(kept: Tensor | Stored) -> Tensor:
        return kept.tensor() if isinstance(kept, Stored) else kept

    with torch.autograd.graph.saved_tensors_hooks(store, restore):
        yield
