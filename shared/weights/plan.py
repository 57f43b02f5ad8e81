"""Which slice of which sender's buffer goes to which receivers: a pure function of two layouts (no torch.distributed).

A layout says, for every rank, which box of which named tensor it holds, and where in which local buffer. Fused
parameters (qkv, gate-up) are boxes of several names in one local buffer; tied ones share a name. The plan covers every
element of every destination box once: identical boxes on several ranks become one transfer with several receivers
(a broadcast), so the bytes that leave senders are the least that the layouts need.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Box:
    """A slice of a tensor: `start` and `size` in elements, one entry per dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        start = tuple(map(max, self.start, other.start))
        size = tuple(b - a for a, b in zip(start, map(min, self.stop, other.stop), strict=True))
        return Box(start, size) if all(n > 0 for n in size) else None


@dataclass(frozen=True, order=True)
class Piece:
    """Box `box` of tensor `tensor` lies on `rank` in buffer `local`, its first element at `offset` there."""

    tensor: str
    box: Box
    rank: int
    local: str
    offset: tuple[int, ...]

    def place(self, box: Box) -> tuple[int, ...]:
        """Where `box` (inside this piece's) starts in the local buffer."""
        return tuple(o + b - p for o, b, p in zip(self.offset, box.start, self.box.start, strict=True))


@dataclass(frozen=True)
class Layout:
    """All pieces of one side."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Place:
    """Where a transferred box starts on one rank."""

    rank: int
    local: str
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """One box, read from one sender's buffer and written to every receiver's."""

    tensor: str
    box: Box
    source: Place
    destinations: tuple[Place, ...]


@dataclass(frozen=True)
class Plan:
    """Transfers in the order in which every rank posts them; kept while both layouts stay (see gather.py)."""

    transfers: tuple[Transfer, ...]

    def sent_elements(self) -> dict[int, int]:
        """Elements that leave each sending rank, a broadcast counted once."""
        sent: dict[int, int] = defaultdict(int)
        for transfer in self.transfers:
            sent[transfer.source.rank] += transfer.box.elements
        return dict(sent)


def make_plan(source: Layout, destination: Layout) -> Plan:
    """The transfers from `source` to `destination`, deterministic, balanced over senders that hold the same data.

    Raises:
        ValueError: a destination element that no source rank holds, by tensor and box.
    """
    held = _group(source.pieces)
    wanted = _group(destination.pieces)
    load: dict[int, int] = defaultdict(int)
    transfers: list[Transfer] = []
    for tensor in sorted(wanted):
        for box, receivers in sorted(wanted[tensor].items()):
            found = _cover(tensor, box, receivers, held.get(tensor, {}), load)
            if sum(t.box.elements for t in found) != box.elements:
                raise ValueError(f"tensor {tensor!r}: no sender holds all of {box}")
            transfers.extend(found)
    return Plan(tuple(transfers))


def _group(pieces: Iterable[Piece]) -> dict[str, dict[Box, list[Piece]]]:
    groups: dict[str, dict[Box, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for piece in sorted(pieces):
        if piece.box.elements:
            groups[piece.tensor][piece.box].append(piece)
    return groups


def _cover(
    tensor: str, box: Box, receivers: Sequence[Piece], held: Mapping[Box, Sequence[Piece]], load: dict[int, int]
) -> list[Transfer]:
    """Cuts `box` along the senders' boxes; each cut goes to the least loaded of its holders."""
    transfers = []
    for source_box, holders in sorted(held.items()):
        cut = box.intersect(source_box)
        if cut is None:
            continue
        holder = min(holders, key=lambda piece: (load[piece.rank], piece.rank))
        load[holder.rank] += cut.elements
        places = tuple(Place(r.rank, r.local, r.place(cut)) for r in receivers)
        transfers.append(Transfer(tensor, cut, Place(holder.rank, holder.local, holder.place(cut)), places))
    return transfers


def replicated(shapes: Mapping[str, Sequence[int]], ranks: int) -> Layout:
    """Every rank holds every tensor whole (a Hugging Face module, data parallel replicas)."""
    return Layout(tuple(whole_piece(name, shape, rank) for name, shape in shapes.items() for rank in range(ranks)))


def sharded(shapes: Mapping[str, Sequence[int]], ranks: int, dims: Mapping[str, int] | None = None) -> Layout:
    """Each tensor in `ranks` chunks along a dimension: 0 (FSDP2) unless `dims` names another (-1: replicated).

    Chunks as torch's `Shard(dim)`: ceil(n / ranks) each, the last ones shorter or empty.
    """
    pieces = []
    for name, shape in shapes.items():
        dim = (dims or {}).get(name, 0)
        for rank in range(ranks):
            pieces.append(
                whole_piece(name, shape, rank) if dim < 0 or not shape else _chunk(name, shape, rank, ranks, dim)
            )
    return Layout(tuple(pieces))


def fused(layout: Layout, groups: Mapping[str, Sequence[str]]) -> Layout:
    """`layout` with several tensors of a rank stacked along dimension 0 into one local buffer (qkv, gate-up).

    Args:
        groups: local buffer name -> the names stacked in it, in order.
    """
    rows: dict[tuple[int, str], int] = defaultdict(int)
    order = {name: (buffer, place) for buffer, names in groups.items() for place, name in enumerate(names)}
    pieces = []
    for piece in sorted(layout.pieces, key=lambda p: (p.rank, order.get(p.tensor, ("", 0))[1], p.tensor)):
        if piece.tensor not in order:
            pieces.append(piece)
            continue
        buffer = order[piece.tensor][0]
        offset = (rows[piece.rank, buffer], *piece.offset[1:])
        rows[piece.rank, buffer] += piece.box.size[0]
        pieces.append(Piece(piece.tensor, piece.box, piece.rank, buffer, offset))
    return Layout(tuple(pieces))


def whole_piece(name: str, shape: Sequence[int], rank: int) -> Piece:
    """All of a tensor, in a buffer of its own name."""
    zeros = (0,) * len(shape)
    return Piece(name, Box(zeros, tuple(shape)), rank, name, zeros)


def _chunk(name: str, shape: Sequence[int], rank: int, ranks: int, dim: int) -> Piece:
    step = -(-shape[dim] // ranks)
    first = min(rank * step, shape[dim])
    length = min(step, shape[dim] - first)
    start = tuple(first if d == dim else 0 for d in range(len(shape)))
    size = tuple(length if d == dim else n for d, n in enumerate(shape))
    return Piece(name, Box(start, size), rank, name, (0,) * len(shape))
