"""Which box of a tensor a rank holds, from the tensor itself: a plain tensor is whole, a DTensor says how it is cut."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shared.weights.plan import Box


def shard_box(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]) -> Box:
    """The box at a coordinate of a device mesh, as torch.distributed.tensor cuts: ceil(n / ranks) each, the last less.

    Args:
        mesh: ranks along each mesh dimension; `coordinate` and `placements` have an entry for each.

    Raises:
        ValueError: a placement that holds no part of the tensor (Partial).
    """
    start, size = [0] * len(shape), list(shape)
    # Mesh dimensions cut one after another; a strided shard (FSDP over tensor parallelism) after the later ones.
    strided = [_is_strided(placement) for placement in placements]
    order = [d for d in range(len(mesh)) if not strided[d]] + [d for d in reversed(range(len(mesh))) if strided[d]]
    for place in order:
        placement = placements[place]
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise ValueError(f"placement {placement} is no part of a tensor: redistribute it before it is published")
        dim = placement.dim
        step = -(-size[dim] // mesh[place])
        first = min(coordinate[place] * step, size[dim])
        start[dim], size[dim] = start[dim] + first, min(step, size[dim] - first)
    return Box(tuple(start), tuple(size))


def local_part(tensor: Tensor) -> tuple[Tensor, Box]:
    """The rank's own elements and the box that they are. Raises ValueError as `shard_box`."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tensor, Box((0,) * tensor.ndim, tuple(tensor.shape))
    held: Any = tensor
    coordinate = held.device_mesh.get_coordinate()
    box = shard_box(held.shape, held.device_mesh.shape, coordinate, placements)
    local = held.to_local()
    if tuple(local.shape) != box.size and box.elements:
        raise ValueError(f"placements {placements} of {tuple(held.shape)} hold {box}, but it is {tuple(local.shape)}")
    return local, box


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"
