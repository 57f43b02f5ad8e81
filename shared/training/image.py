"""A safetensors file in main memory: filled from live tensors at the speed of a copy, written to disk later."""

import json
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from .device import free_pinned

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
"""By their names in the format (https://github.com/huggingface/safetensors): a length, a JSON header, the tensors."""
ALIGNMENT = 8


class Image:
    """One file. Its memory is used again: new pages would cost as much time as the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def content(self) -> memoryview:
        """The file's bytes, until the next `fill`."""
        return self._memory.numpy().data

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors (of this process, any device); those on a GPU may still be on their way: synchronise.

        Raises:
            MemoryError: main memory does not suffice; nothing was changed but this image.
        """
        # The widest first, so that each lies at a multiple of its width.
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        entries, size = {}, 0
        for name in names:
            tensor = tensors[name]
            place = [size, size := size + tensor.nbytes]
            entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % ALIGNMENT)
        start = len(header) + 8
        self._make_room(start + size, any(tensor.is_cuda for tensor in tensors.values()))
        self._memory[:start] = torch.frombuffer(bytearray(struct.pack("<Q", len(header)) + header), dtype=torch.uint8)
        for name in names:
            begin, end = (start + offset for offset in entries[name]["data_offsets"])
            held = self._memory[begin:end].view(tensors[name].dtype).view(tensors[name].shape)
            held.copy_(tensors[name], non_blocking=True)

    def _make_room(self, size: int, pinned: bool) -> None:
        if self._memory.numel() == size:
            return
        # The old one goes first: both together may be too much.
        self._memory = torch.empty(0, dtype=torch.uint8)
        free_pinned()
        try:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            raise MemoryError(f"a copy of {size} bytes of the state for a checkpoint: {error}") from error
