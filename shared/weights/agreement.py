"""What the ranks of a transfer have agreed on, as JoinResponse says it: layouts, and with them plan and schedule."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.gen.sextet.v1 import weights_pb2
from shared.weights.digest import sums_digest
from shared.weights.plan import Box, Layout, Piece, make_plan, whole_piece
from shared.weights.schedule import CPU, Schedule, make_schedule

_WRAP = 2**64


@dataclass(frozen=True)
class Agreement:
    """An answer to Join, read.

    Attributes:
        shapes, dtypes: of the tensors that travel, by name; aliases included.
        pieces: of every rank.
        schedule: what each rank does.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    pieces: Sequence[Sequence[Piece]]
    schedule: Schedule


def read_agreement(answer: weights_pb2.JoinResponse, widths: Mapping[str, int]) -> Agreement:
    """Makes plan and schedule; every rank makes the same ones.

    Args:
        widths: bytes of an element, by dtype name.

    Raises:
        ValueError: a receiver wants what no sender holds.
    """
    infos = answer.manifest.tensors
    shapes = {info.name: tuple(info.shape) for info in infos}
    dtypes = {info.name: info.dtype for info in infos}
    aliases = {info.name: info.alias_of for info in infos if info.alias_of}
    pieces = [_pieces(rank, number, shapes, aliases) for number, rank in enumerate(answer.ranks)]
    sent = [piece for own in pieces[: answer.senders] for piece in own]
    # Who wants a tied tensor by its other name gets it from the same buffer.
    sent += [
        Piece(name, piece.box, piece.rank, piece.local, piece.offset)
        for name, first in aliases.items()
        for piece in sent
        if piece.tensor == first
    ]
    wanted = [piece for own in pieces[answer.senders :] for piece in own]
    plan = make_plan(Layout(tuple(sent)), Layout(tuple(wanted)))
    by_tensor = {name: widths[dtype] for name, dtype in dtypes.items()}
    sees = [[f"{rank.host}/{uuid}" for uuid in rank.sees] for rank in answer.ranks]
    schedule = make_schedule(plan, by_tensor, [device_of(rank) for rank in answer.ranks], answer.bucket_bytes, sees)
    return Agreement(shapes, dtypes, pieces, schedule)


def device_of(rank: weights_pb2.WeightRank) -> str:
    """A name of its device that is unique over all machines; every CPU is the same."""
    return CPU if rank.device == CPU else f"{rank.host}/{rank.device}"


def piece_message(piece: Piece) -> weights_pb2.WeightPiece:
    """As it travels."""
    return weights_pb2.WeightPiece(
        tensor=piece.tensor, start=piece.box.start, size=piece.box.size, local=piece.local, offset=piece.offset
    )


def digests_of(pieces: Iterable[weights_pb2.WeightPiece], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Digests of the tensors that these pieces of any ranks make whole; the same box on several ranks counts once.

    Raises:
        ValueError: ranks hold the same box and differ; the tensor is named.
    """
    boxes: dict[str, dict[Box, Sequence[int]]] = {}
    for piece in pieces:
        box, sums = Box(tuple(piece.start), tuple(piece.size)), list(piece.sums)
        if boxes.setdefault(piece.tensor, {}).setdefault(box, sums) != sums:
            raise ValueError(f"tensor {piece.tensor!r}: two ranks hold {box} and differ")
    return {
        name: sums_digest([_signed(sum(column)) for column in zip(*held.values(), strict=True)])
        for name, held in boxes.items()
        if sum(box.elements for box in held) == math.prod(shapes[name])
    }


def _pieces(
    rank: weights_pb2.WeightRank, number: int, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
) -> list[Piece]:
    if rank.pieces:
        return [_piece(piece, number) for piece in rank.pieces]
    absent = set(aliases) | set(rank.keeps)
    return [whole_piece(name, shape, number) for name, shape in shapes.items() if name not in absent]


def _piece(piece: weights_pb2.WeightPiece, rank: int) -> Piece:
    start, size = tuple(piece.start), tuple(piece.size)
    return Piece(
        piece.tensor, Box(start, size), rank, piece.local or piece.tensor, tuple(piece.offset) or (0,) * len(size)
    )


def _signed(number: int) -> int:
    return (number + _WRAP // 2) % _WRAP - _WRAP // 2
