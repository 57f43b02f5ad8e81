"""Blocks: rows and their ragged columns, in numpy. What a process makes, keeps and reads; never padded."""

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import xxhash

from shared.batch.columns import Dtype, RowKey, dtype_of, some

__all__ = ["Block", "Ragged", "RowKey"]

_NUMPY = {"int32": np.dtype("<i4"), "float32": np.dtype("<f4"), "uint8": np.dtype("u1"), "utf8": np.dtype("u1")}


@dataclass(frozen=True, eq=False)
class Ragged:
    """A ragged column: flat elements and the number of them in each row.

    Args:
        data: [sum of lengths] int32, float32 or uint8; kept read-only, not copied.
        lengths: [rows] uint32.
        text: the elements are UTF-8 bytes.
    """

    data: np.ndarray
    lengths: np.ndarray
    text: bool = False

    def __post_init__(self) -> None:
        if str(self.data.dtype) not in _NUMPY or (self.text and self.data.dtype != np.uint8):
            raise ValueError(f"a column of {self.data.dtype}{' text' if self.text else ''}: use {', '.join(_NUMPY)}")
        if self.data.ndim != 1 or self.lengths.ndim != 1 or self.lengths.dtype != np.uint32:
            raise ValueError(
                f"a column needs flat data and uint32 lengths, not {self.data.shape} and "
                f"{self.lengths.dtype}{self.lengths.shape}"
            )
        if int(self.lengths.sum(dtype=np.uint64)) != self.data.size:
            raise ValueError(f"lengths add up to {self.lengths.sum(dtype=np.uint64)}, but {self.data.size} elements")
        for name in ("data", "lengths"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray | Sequence[float]], dtype: Dtype) -> "Ragged":
        """One array or list per row, converted to dtype (int32, float32 or uint8)."""
        if dtype == "utf8":
            raise ValueError("text columns are made by Ragged.from_text")
        arrays = [np.asarray(row, dtype=_NUMPY[dtype]) for row in rows]
        lengths = np.fromiter((a.size for a in arrays), np.uint32, len(arrays))
        return cls(np.concatenate(arrays) if arrays else np.empty(0, _NUMPY[dtype]), lengths)

    @classmethod
    def from_scalars(cls, values: np.ndarray | Sequence[float], dtype: Dtype) -> "Ragged":
        """One element per row."""
        data = np.array(values, dtype=_NUMPY[dtype])
        return cls(data, np.ones(data.size, np.uint32))

    @classmethod
    def from_text(cls, texts: Sequence[str]) -> "Ragged":
        """One text per row. Lone surrogates (seen in model output) become U+FFFD."""
        encoded = [text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode() for text in texts]
        lengths = np.fromiter((len(e) for e in encoded), np.uint32, len(encoded))
        return cls(np.frombuffer(b"".join(encoded), np.uint8), lengths, text=True)

    @classmethod
    def together(cls, pieces: Sequence["Ragged"]) -> "Ragged":
        """The rows of at least one column of the same type, one after the other."""
        data = np.concatenate([piece.data for piece in pieces])
        return cls(data, np.concatenate([piece.lengths for piece in pieces]), pieces[0].text)

    def __len__(self) -> int:
        return self.lengths.size

    def __eq__(self, other: object) -> bool:
        """Same type and same bits: NaN equals NaN."""
        if not isinstance(other, Ragged):
            return NotImplemented
        same = self.dtype == other.dtype and np.array_equal(self.lengths, other.lengths)
        return same and self.data.tobytes() == other.data.tobytes()

    __hash__ = None  # type: ignore[assignment]

    @property
    def dtype(self) -> Dtype:
        return "utf8" if self.text else cast(Dtype, str(self.data.dtype))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.lengths.nbytes

    @cached_property
    def offsets(self) -> np.ndarray:
        """[rows + 1] int64: row i is data[offsets[i] : offsets[i + 1]]."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def rows(self) -> list[np.ndarray]:
        """The rows' elements, as views."""
        bounds = self.offsets.tolist()
        return [self.data[start:end] for start, end in itertools.pairwise(bounds)]

    def texts(self) -> list[str]:
        """The rows of a text column."""
        if not self.text:
            raise ValueError(f"a column of {self.dtype} has no texts")
        return [row.tobytes().decode() for row in self.rows()]

    def scalars(self) -> np.ndarray:
        """[rows]: the only element of each row."""
        if not (self.lengths == 1).all():
            raise ValueError("not a scalar column: some rows do not have exactly one element")
        return self.data

    def take(self, indices: Sequence[int]) -> "Ragged":
        """The rows at these positions, in this order."""
        rows = self.rows()
        data = np.concatenate([rows[i] for i in indices]) if len(indices) else self.data[:0]
        return Ragged(data, self.lengths[np.asarray(indices, np.int64)], self.text)


class MissingColumn(KeyError, ValueError):
    """A batch that lacks a column: for who looks it up as for who asks whether the batch is right."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Block:
    """Rows and columns. Rows are unique; columns of known names have their known type.

    Raises:
        ValueError: naming the row or column that breaks this.
    """

    rows: tuple[RowKey, ...]
    columns: Mapping[str, Ragged]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows))
        if len(self._positions) != len(self.rows):
            twice = next(key for i, key in enumerate(self.rows) if self._positions[key] != i)
            raise ValueError(f"row {twice} is twice in the block")
        for name, column in self.columns.items():
            if len(column) != len(self.rows):
                raise ValueError(f"column {name!r} has {len(column)} rows, the block {len(self.rows)}")
            if dtype_of(name) not in (None, column.dtype):
                raise ValueError(f"column {name!r} is {column.dtype}, not {dtype_of(name)}")

    def __getitem__(self, name: str) -> Ragged:
        try:
            return self.columns[name]
        except KeyError:
            raise MissingColumn(f"no column {name!r}; the block has {', '.join(self.columns) or 'none'}") from None

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _positions(self) -> dict[RowKey, int]:
        return {key: i for i, key in enumerate(self.rows)}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of columns and keys."""
        return sum(c.nbytes for c in self.columns.values()) + sum(len(key.uid) + 4 for key in self.rows)

    def select(self, rows: Sequence[RowKey] | None = None, columns: Sequence[str] | None = None) -> "Block":
        """These rows and columns, in this order; None: all as they are.

        Raises:
            KeyError: naming what the block does not have.
        """
        picked = {name: self[name] for name in (self.columns if columns is None else columns)}
        if rows is None or tuple(rows) == self.rows:
            # The whole block keeps its digest.
            return self if list(picked) == list(self.columns) else Block(self.rows, picked)
        missing = [key for key in rows if key not in self._positions]
        if missing:
            raise KeyError(f"no rows {some(missing)}")
        indices = [self._positions[key] for key in rows]
        return Block(tuple(rows), {name: column.take(indices) for name, column in picked.items()})

    def layout(self) -> Iterator[bytes | memoryview]:
        """What a digest covers before the data: row keys, column names, types and lengths, unambiguously."""
        yield json.dumps([self.rows, [[name, c.dtype] for name, c in self.columns.items()]]).encode()
        for column in self.columns.values():
            yield raw_bytes(column.lengths)

    def buffers(self) -> list[memoryview]:
        """The columns' data as little-endian bytes, in column order."""
        return [raw_bytes(column.data) for column in self.columns.values()]

    def digest(self) -> str:
        """xxh3-128 (hex) over names, types, row keys, lengths and data."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = xxhash.xxh3_128()
        for part in (*self.layout(), *self.buffers()):
            state.update(part)
        return state.hexdigest()


def raw_bytes(array: np.ndarray) -> memoryview:
    """A flat array's bytes, without a copy."""
    return np.ascontiguousarray(array).view(np.uint8).data


def _frozen(array: np.ndarray) -> np.ndarray:
    # Blocks are shared by the store and every local reader: one that writes would change what others read.
    view = array.view()
    view.flags.writeable = False
    return view


if sys.byteorder != "little":
    raise ImportError("Sextet's wire format is little-endian; this machine is not")
