"""Joining blocks by row key: which parts to read, and one block of them. Pure; the reader does the reading."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from shared.batch import codec
from shared.batch.block import Block, Ragged
from shared.batch.columns import RowKey, some
from shared.batch.refs import column_names, keys_of, row_keys, twice
from shared.gen.sextet.v1 import batch_pb2
from shared.rpc.errors import InvalidArgument


@dataclass(frozen=True)
class Part:
    """What is read of one block."""

    ref: batch_pb2.BlockRef
    rows: tuple[RowKey, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The batch wanted, and the parts that make it."""

    rows: tuple[RowKey, ...]
    columns: dict[str, int]
    """Names and element types, in order."""
    parts: tuple[Part, ...]


def plan(ref: batch_pb2.BatchRef, columns: Sequence[str] | None, rows: Sequence[RowKey] | None) -> Plan:
    """Finds for every wanted row and column the one block that has it; no more than that is read.

    Raises:
        InvalidArgument: naming columns or rows that are missing, or come from two blocks.
    """
    keys = row_keys(ref) if rows is None else list(rows)
    if len(set(keys)) != len(keys):
        raise InvalidArgument(f"rows asked for twice: {some(twice(keys))}")
    names = list(dict.fromkeys(column_names(ref) if columns is None else columns))
    types = {column.name: column.dtype for block in ref.blocks for column in block.columns}
    for name in names:
        if name not in types:
            raise InvalidArgument(_unknown_column(name, list(types)))
        if types[name] not in codec.ELEMENT_TYPES:
            raise InvalidArgument(f"column {name!r} has the unknown element type {types[name]}")
    held = [set(keys_of(block.rows)) for block in ref.blocks]
    owners = {name: [i for i, b in enumerate(ref.blocks) if name in (c.name for c in b.columns)] for name in names}
    for blocks in {tuple(blocks) for blocks in owners.values()}:
        covered = ", ".join(repr(name) for name in names if tuple(owners[name]) == blocks)
        _check_cover(f"column {covered}", keys, [(ref.blocks[i], held[i]) for i in blocks])
    parts = []
    for i, block in enumerate(ref.blocks):
        part = Part(block, tuple(k for k in keys if k in held[i]), tuple(n for n in names if i in owners[n]))
        if part.rows and part.columns:
            parts.append(part)
    return Plan(tuple(keys), {name: types[name] for name in names}, tuple(parts))


def join(wanted: Plan, blocks: Sequence[Block]) -> Block:
    """The wanted batch, made of the parts' blocks (one per part, in order)."""
    columns = {}
    for name, dtype in wanted.columns.items():
        having = [block for block in blocks if name in block]
        columns[name] = _joined(name, wanted.rows, having) if having else codec.empty_column(dtype)
    return Block(wanted.rows, columns)


def _joined(name: str, keys: tuple[RowKey, ...], blocks: list[Block]) -> Ragged:
    if len(blocks) == 1 and blocks[0].rows == keys:
        return blocks[0][name]
    pieces = [block[name] for block in blocks]
    if len({piece.dtype for piece in pieces}) > 1:
        raise InvalidArgument(f"column {name!r} is {' and '.join(p.dtype for p in pieces)} in different blocks")
    together = Ragged.together(pieces)
    order = [key for block in blocks for key in block.rows]
    if tuple(order) == keys:
        return together
    positions = {key: i for i, key in enumerate(order)}
    return together.take([positions[key] for key in keys])


def _check_cover(what: str, keys: list[RowKey], blocks: list[tuple[batch_pb2.BlockRef, set[RowKey]]]) -> None:
    """Every key is in exactly one of the blocks."""
    missing = []
    for key in keys:
        found = [block for block, held in blocks if key in held]
        if len(found) > 1:
            places = " and ".join(f"{block.block} on {block.endpoint}" for block in found)
            raise InvalidArgument(f"{what} of row {key} comes from two blocks: {places}")
        if not found:
            missing.append(key)
    if missing:
        raise InvalidArgument(f"{what} is missing for {len(missing)} of {len(keys)} rows: {some(missing)}")


def _unknown_column(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
    return f"the batch has no column {name!r}; {hint}"
