"""Digests of tensors and of whole versions: how sender and receiver agree on what a version is (law 4)."""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from shared.weights.sums import SUMS, box_sums


class Fingerprint(NamedTuple):
    """What identifies one named tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, without a copy; writing to them writes the tensor."""
    # numpy knows no bfloat16; as uint8 every dtype is the same.
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")


def tensor_digest(tensor: Tensor) -> str:
    """Of the bytes and their places: xxh3-128 (hex) of the tensor's sums (see sums.py), computed where it lies."""
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Sequence[Tensor]) -> list[str]:
    """Of each tensor. A GPU computes them all before it is waited for."""
    sums = [box_sums(tensor, (0,) * tensor.ndim, tensor.shape) for tensor in tensors]
    return [sums_digest(each) for each in on_host(sums)]


def sums_digest(sums: Sequence[int]) -> str:
    """The digest of a tensor with these eight sums."""
    return xxhash.xxh3_128_hexdigest(struct.pack(f"<{SUMS}q", *sums))


def on_host(sums: Sequence[Tensor]) -> list[list[int]]:
    """Rows of integers; one copy per device, however many there are."""
    found: dict[int, list[int]] = {}
    by_device: dict[torch.device, list[int]] = {}
    for place, each in enumerate(sums):
        by_device.setdefault(each.device, []).append(place)
    for places in by_device.values():
        found |= dict(zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True))
    return [found[place] for place in range(len(sums))]


def total_digest(fingerprints: Iterable[Fingerprint]) -> str:
    """xxh3-128 (hex) over names, dtypes, shapes and digests; independent of their order."""
    text = json.dumps(sorted(fingerprints))
    return xxhash.xxh3_128_hexdigest(text.encode())


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """The total digest of a state dict: equal to the WeightsRef's when these are the weights that were published."""
    digests = tensor_digests(list(tensors.values()))
    return total_digest(
        Fingerprint(name, dtype_name(tensor.dtype), tuple(tensor.shape), digest)
        for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
    )


def tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that share their tensor with an earlier name, and that name."""
    first: dict[Sequence[object], str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if first.setdefault(place, name) != name:
            aliases[name] = first[place]
    return aliases
