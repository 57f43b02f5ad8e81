"""Carries out a schedule on one rank: from where the bytes lie to where they belong; what must be packed overlaps."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shared.failpoints import hit
from shared.weights.group import Group
from shared.weights.plan import Place
from shared.weights.schedule import Bucket, Part, Schedule

SLOTS = 2
"""Buckets under way at once: one is packed or unpacked while another travels."""


def run(schedule: Schedule, group: Group, local: Mapping[str, Tensor], deadline: float) -> None:
    """Sends and receives this rank's buckets, in order; returns when all bytes are where they belong.

    On a GPU it uses the present stream, and NCCL's own.

    Args:
        local: this rank's buffers by name; what it receives is written into them.
        deadline: of time.monotonic().

    Raises:
        WireError: it did not come to its end; what was to be received is worthless.
    """
    mine = [bucket for bucket in schedule.buckets if group.rank in schedule.routes[bucket.route].ranks]
    if not mine:
        return
    device = next(iter(local.values())).device
    lane = _Lane(schedule, group, local, deadline)
    buffers = _Buffers(max(bucket.nbytes for bucket in mine), device)
    under_way: list[Callable[[], None]] = []
    for number, bucket in enumerate(mine):
        if len(under_way) == SLOTS:
            under_way.pop(0)()
        hit(f"weights.bucket.{number}")
        under_way.append(lane.start(bucket, lambda slot=number % SLOTS: buffers[slot]))
    for finish in under_way:
        finish()
    if device.type == "cuda":
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        group.until(done.query, deadline, lambda: "the other side")
    group.forget()


class _Buffers(dict[int, Tensor]):
    """Of the slots, made when first used: what lies in memory as it travels needs none."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self._size, self._device = size, device

    def __missing__(self, slot: int) -> Tensor:
        self[slot] = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        return self[slot]


class _Lane:
    """Starts and finishes buckets of one rank."""

    def __init__(self, schedule: Schedule, group: Group, local: Mapping[str, Tensor], deadline: float) -> None:
        self._schedule, self._group, self._local, self._deadline = schedule, group, local, deadline

    def start(self, bucket: Bucket, slot: Callable[[], Tensor]) -> Callable[[], None]:
        """Packs, if it sends, and starts the broadcast; returns what has to be done before the buffer is used again."""
        sends = self._schedule.routes[bucket.route].source == self._group.rank
        places = [self._place(part, sends) for part in bucket.parts]
        regions = [region(self._local, place, part.box.size) for place, part in zip(places, bucket.parts, strict=True)]
        here = _in_place(bucket, regions, [self._local[place.local] for place in places])
        flat = slot()[: bucket.nbytes] if here is None else here
        if sends and here is None:
            for part, own in zip(bucket.parts, regions, strict=True):
                _view(flat, part, own).copy_(own)
        work = self._group.broadcast(bucket.route, flat)

        def finish() -> None:
            self._group.settle(work, bucket.route, self._deadline)
            if not sends and here is None:
                for part, own in zip(bucket.parts, regions, strict=True):
                    own.copy_(_view(flat, part, own))

        return finish

    def _place(self, part: Part, sends: bool) -> Place:
        return part.source if sends else next(p for p in part.destinations if p.rank == self._group.rank)


def region(local: Mapping[str, Tensor], place: Place, size: Sequence[int]) -> Tensor:
    """The view of a local buffer that a box is."""
    window = tuple(slice(first, first + count) for first, count in zip(place.offset, size, strict=True))
    return local[place.local][window]


def _in_place(bucket: Bucket, regions: Sequence[Tensor], buffers: Sequence[Tensor]) -> Tensor | None:
    """The bucket's bytes where they are, uint8, if its parts lie there as they do in the bucket; None: pack them.

    Args:
        regions: its parts on this rank.
        buffers: the local buffer of each.
    """
    first, storage = regions[0].data_ptr(), regions[0].untyped_storage()
    end, buffer_end = first, 0
    for part, own, buffer in zip(bucket.parts, regions, buffers, strict=True):
        begin = own.data_ptr()
        if not own.is_contiguous() or begin != first + part.offset:
            return None
        if own.untyped_storage().data_ptr() != storage.data_ptr():
            return None
        # The bytes between two parts are written over: they have to be those between two buffers.
        if begin != end and not (end == buffer_end and begin == buffer.data_ptr()):
            return None
        end, buffer_end = begin + own.nbytes, buffer.data_ptr() + buffer.nbytes
    flat = torch.empty(0, dtype=torch.uint8, device=regions[0].device)
    return flat.set_(storage, first - storage.data_ptr(), (bucket.nbytes,), (1,))


def _view(buffer: Tensor, part: Part, like: Tensor) -> Tensor:
    return buffer[part.offset : part.offset + part.nbytes].view(like.dtype).view(like.shape)
