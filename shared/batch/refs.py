"""Batches by reference: merged, cut and split. All that the controller sees of a batch: no numpy, no torch."""

import heapq
from collections.abc import Iterable, Sequence

from shared.batch.columns import RowKey, some
from shared.gen.sextet.v1 import batch_pb2, common_pb2
from shared.rpc.errors import InvalidArgument

Ref = batch_pb2.BatchRef | batch_pb2.BlockRef


def merge(*refs: Ref) -> batch_pb2.BatchRef:
    """One ref to all columns and rows of the given ones; a block given twice is kept once.

    Raises:
        InvalidArgument: a row's column comes from two blocks.
    """
    merged = batch_pb2.BatchRef()
    seen = set()
    for block in (block for ref in refs for block in _blocks(ref)):
        identity = (block.endpoint, block.block, tuple(keys_of(block.rows)))
        if identity not in seen:
            seen.add(identity)
            merged.blocks.append(block)
    _check_disjoint(merged)
    return merged


def row_keys(ref: Ref) -> list[RowKey]:
    """The rows in the order in which the blocks first name them: the order of a batch."""
    return list(dict.fromkeys(key for block in _blocks(ref) for key in keys_of(block.rows)))


def column_names(ref: Ref) -> list[str]:
    """The columns, in order of their first block."""
    return list(dict.fromkeys(column.name for block in _blocks(ref) for column in block.columns))


def row_tokens(ref: Ref) -> dict[RowKey, int]:
    """Tokens of each row; where blocks differ, the most."""
    tokens: dict[RowKey, int] = {}
    for block in _blocks(ref):
        for key, count in _counted(block):
            tokens[key] = max(count, tokens.get(key, 0))
    return tokens


def select_rows(ref: Ref, keys: Sequence[RowKey]) -> batch_pb2.BatchRef:
    """The ref cut to these rows, in this order within each block; blocks left without rows are dropped.

    Raises:
        InvalidArgument: naming rows that the ref does not have, or that are asked for twice.
    """
    known = set(row_keys(ref))
    if missing := [key for key in keys if key not in known]:
        raise InvalidArgument(f"the batch has no rows {some(missing)}")
    if len(set(keys)) != len(keys):
        raise InvalidArgument(f"rows asked for twice: {some(twice(keys))}")
    selected = batch_pb2.BatchRef()
    for block in _blocks(ref):
        tokens = dict(_counted(block))
        picked = [key for key in keys if key in tokens]
        if picked:
            part = selected.blocks.add()
            part.CopyFrom(block)
            del part.rows[:], part.tokens[:]
            part.rows.extend(messages_of(picked))
            part.tokens.extend(tokens[key] for key in picked)
    return selected


def split_by_tokens(ref: Ref, parts: int, *, keep_prompts: bool = False) -> list[batch_pb2.BatchRef]:
    """Shares of about equal tokens, by longest processing time first (Graham 1969); deterministic.

    Args:
        parts: shares wanted, at least 1.
        keep_prompts: all samples of one prompt stay together.

    Returns:
        At most `parts` refs, none empty; each keeps the batch's row order.
    """
    if parts < 1:
        raise InvalidArgument(f"a batch cannot be split into {parts} parts")
    keys = row_keys(ref)
    tokens = row_tokens(ref)
    groups: dict[object, list[RowKey]] = {}
    for key in keys:
        groups.setdefault(key.uid if keep_prompts else key, []).append(key)
    sized = [(sum(tokens[key] for key in group), group) for group in groups.values()]
    sized.sort(key=lambda item: -item[0])  # stable: ties stay in batch order
    shares: list[set[RowKey]] = [set() for _ in range(parts)]
    # Rows break ties, so that rows without tokens are spread too.
    loads = [(0, 0, index) for index in range(parts)]
    for size, group in sized:
        load, rows, index = loads[0]
        heapq.heapreplace(loads, (load + size, rows + len(group), index))
        shares[index].update(group)
    return [select_rows(ref, [key for key in keys if key in share]) for share in shares if share]


def keys_of(rows: Iterable[common_pb2.RowKey]) -> list[RowKey]:
    return [RowKey(row.uid, row.sample) for row in rows]


def messages_of(keys: Iterable[RowKey]) -> list[common_pb2.RowKey]:
    return [common_pb2.RowKey(uid=key.uid, sample=key.sample) for key in keys]


def twice(keys: Sequence[RowKey]) -> list[RowKey]:
    """The keys that occur more than once."""
    seen: set[RowKey] = set()
    return [key for key in keys if key in seen or seen.add(key)]


def _counted(block: batch_pb2.BlockRef) -> list[tuple[RowKey, int]]:
    """Each row and its tokens."""
    if len(block.rows) != len(block.tokens):
        where = f"block {block.block!r} on {block.endpoint}"
        raise InvalidArgument(f"{where}: {len(block.rows)} rows, and tokens of {len(block.tokens)}")
    return list(zip(keys_of(block.rows), block.tokens, strict=True))


def _blocks(ref: Ref) -> Sequence[batch_pb2.BlockRef]:
    return [ref] if isinstance(ref, batch_pb2.BlockRef) else ref.blocks


def _check_disjoint(ref: batch_pb2.BatchRef) -> None:
    """No row has the same column in two blocks."""
    for name in column_names(ref):
        owner: dict[RowKey, batch_pb2.BlockRef] = {}
        for block in ref.blocks:
            if name not in (column.name for column in block.columns):
                continue
            for key in keys_of(block.rows):
                other = owner.setdefault(key, block)
                if other is not block:
                    raise InvalidArgument(
                        f"column {name!r} of row {key} comes from two blocks: "
                        f"{other.block} on {other.endpoint} and {block.block} on {block.endpoint}"
                    )
