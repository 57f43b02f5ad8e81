"""GPU memory that another process on the same machine reads where it is (CUDA IPC), and names of devices."""

import functools
import math
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shared.gen.sextet.v1 import weights_pb2
from shared.weights.codec import DTYPES
from shared.weights.schedule import CPU


@functools.cache
def this_host() -> str:
    """A name of this machine that no other one has; its containers have the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():x}"


def device_name(device: torch.device) -> str:
    """ "cpu", or the UUID of a GPU: its number differs between processes."""
    return CPU if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def visible_devices(device: torch.device) -> list[str]:
    """UUIDs of the GPUs whose memory a process that works on this GPU can read, its own included."""
    if device.type == CPU:
        return []
    own = torch.cuda.current_device() if device.index is None else device.index
    others = [n for n in range(torch.cuda.device_count()) if n == own or torch.cuda.can_device_access_peer(own, n)]
    return [device_name(torch.device("cuda", n)) for n in others]


_NO_COUNTER = b"/sextet-counts-nothing"
"""Where a process that lets go of mapped memory would say so: nowhere, which torch takes for an exporter that ended."""


def share_memory(memory: Tensor) -> weights_pb2.DeviceMemory:
    """How another process finds a tensor that is all of its storage, for as long as it is held here.

    Whoever reads it later reads something else, and learns that from the digests.
    """
    device, handle, size, offset, counter, counter_offset, event, _ = memory.untyped_storage()._share_cuda_()
    # Otherwise torch keeps the memory until it was mapped and let go, which a process that died never does. Nobody else
    # may count: whoever lets go after this takes one from zero, which torch reads as a number of users without end.
    torch.UntypedStorage._release_ipc_counter(counter, counter_offset, device=device)
    return weights_pb2.DeviceMemory(
        device=device,
        handle=handle,
        storage_bytes=size,
        storage_offset=offset,
        event=event,
        # What is shared has been summed up, so it is there; a reader would never let go of the event.
        event_required=False,
    )


def map_memory(memory: weights_pb2.DeviceMemory, uuid: str) -> Tensor:
    """Another process's memory, uint8, on the GPU of this UUID; nothing is copied.

    Only its maker writes it, and nobody may read it when its maker has gone.
    """
    [device] = [n for n in range(torch.cuda.device_count()) if device_name(torch.device("cuda", n)) == uuid]
    storage = torch.UntypedStorage._new_shared_cuda(
        device,
        memory.handle,
        memory.storage_bytes,
        memory.storage_offset,
        _NO_COUNTER,
        0,
        memory.event,
        memory.event_required,
    )
    empty = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device))
    return empty.set_(storage, 0, (memory.storage_bytes,), (1,))


def mapped_buffers(rank: weights_pb2.WeightRank, dtypes: Mapping[str, str]) -> dict[str, Tensor]:
    """A sender's local buffers, in its memory. Their names are those of the tensors."""
    memory = map_memory(rank.memory, rank.device)
    found = {}
    for piece in rank.pieces:
        dtype = DTYPES[dtypes[piece.tensor]]
        nbytes = math.prod(piece.size) * dtype.itemsize
        found[piece.tensor] = memory[piece.at : piece.at + nbytes].view(dtype).view(tuple(piece.size))
    return found
