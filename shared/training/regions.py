"""Which part of a tensor this rank holds: for reading a rank's part from files, and for writing it."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from shared.weights.layout import shard_box

from .parallel import TP, Parallel


@dataclass(frozen=True)
class Region:
    """A box of a tensor of `shape`: `sizes` elements from `offsets` on, in each dimension."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def empty(self) -> bool:
        """No element; a scalar has one."""
        return 0 in self.sizes

    def overlap(self, other: "Region") -> "Region":
        """What both have."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True))
        return Region(self.shape, tuple(starts), sizes)

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`."""
        starts = [a - b for a, b in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_part_of(whole: Tensor, part: Tensor) -> Tensor:
    """This rank's part as what `whole` is: a tensor that is sharded in the same way, or the part itself."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def region_of(tensor: Tensor) -> Region:
    """The part that this rank holds."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Region(shape, (0,) * len(shape), shape)
    mesh = tensor.device_mesh
    box = shard_box(shape, mesh.shape, mesh.get_coordinate() or (), tensor.placements)
    region = Region(shape, box.start, box.size)
    if tuple(local(tensor).shape) != region.sizes:
        raise AssertionError(f"{tensor.placements} of {shape} holds {tuple(local(tensor).shape)}, not {region.sizes}")
    return region


def is_writer(tensor: Tensor, parallel: Parallel) -> bool:
    """Whether it is this rank that writes its part, of all ranks of its stage that hold the same."""
    if not isinstance(tensor, DTensor):
        return parallel.place == 0
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    first = all(
        mesh.get_local_rank(place) == 0
        for place in range(mesh.ndim)
        if getattr(tensor.placements[place], "dim", None) is None
    )
    return first and (TP in names or parallel.tp_rank == 0)
