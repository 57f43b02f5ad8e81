"""Carries out a schedule on one rank: packing, sending and unpacking overlap, on a stream of their own on a GPU."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

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
    with own_stream(device) as stream:
        buffers = _Buffers(max(bucket.nbytes for bucket in mine), device)
        under_way: list[Callable[[], None]] = []
        for number, bucket in enumerate(mine):
            if len(under_way) == SLOTS:
                under_way.pop(0)()
            hit(f"weights.bucket.{number}")
            under_way.append(lane.start(bucket, lambda slot=number % SLOTS: buffers[slot]))
        for finish in under_way:
            finish()
        if stream is not None:
            done = torch.cuda.Event()
            done.record(stream)
            group.until(done.query, deadline, lambda: "the other side")


class _Buffers(dict[int, Tensor]):
    """Of the slots, made when first used: what is contiguous and alone in its bucket needs none."""

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
        regions = [region(self._local, self._place(part, sends), part.box.size) for part in bucket.parts]
        direct = len(regions) == 1 and regions[0].is_contiguous()
        flat = regions[0].reshape(-1).view(torch.uint8) if direct else slot()[: bucket.nbytes]
        if sends and not direct:
            for part, own in zip(bucket.parts, regions, strict=True):
                _view(flat, part, own).copy_(own)
        work = self._group.broadcast(bucket.route, flat)

        def finish() -> None:
            self._group.settle(work, bucket.route, self._deadline)
            if not sends and not direct:
                for part, own in zip(bucket.parts, regions, strict=True):
                    own.copy_(_view(flat, part, own))

        return finish

    def _place(self, part: Part, sends: bool) -> Place:
        return part.source if sends else next(p for p in part.destinations if p.rank == self._group.rank)


def region(local: Mapping[str, Tensor], place: Place, size: Sequence[int]) -> Tensor:
    """The view of a local buffer that a box is."""
    window = tuple(slice(first, first + count) for first, count in zip(place.offset, size, strict=True))
    return local[place.local][window]


def _view(buffer: Tensor, part: Part, like: Tensor) -> Tensor:
    return buffer[part.offset : part.offset + part.nbytes].view(like.dtype).view(like.shape)


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """On a GPU, a stream beside the one that computes; None on the CPU."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield stream
