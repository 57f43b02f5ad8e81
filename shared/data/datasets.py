"""Prompt datasets in verl's columns, parquet or jsonl: data_source, prompt, ability, reward_model, extra_info.

Only `prompt` is needed by generation; a grader may want the others.
"""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

_KNOWN = ("data_source", "ability", "reward_model", "extra_info")
_SUFFIXES = (".parquet", ".jsonl", ".json")

Messages = list[dict[str, Any]]


class DataError(ValueError):
    """A dataset that cannot be used; the text names file, row or column, and what to change."""


@dataclass(frozen=True)
class PromptExample:
    """One row.

    Attributes:
        prompt: chat messages, or text that is used as it is.
        ground_truth: reward_model["ground_truth"]: text as it is, anything else as JSON; "" without.
        extra_info: JSON of the extra_info column, with ability and the file's further columns under their names
            (TRL's reward functions get those as arguments).
    """

    prompt: Messages | str
    data_source: str
    ground_truth: str
    extra_info: str

    @property
    def prompt_json(self) -> str:
        """The prompt as JSON: a list of messages or a string."""
        return _json(self.prompt)


class Dataset:
    """Rows of one file, made when asked for.

    Args:
        path: .parquet, .jsonl or .json (one object per line).
        prompt_key: the column of prompts.

    Raises:
        DataError: no such file, not readable, no rows, or no such column.
    """

    def __init__(self, path: str, prompt_key: str = "prompt") -> None:
        self.path, self._prompt_key = path, prompt_key
        self._file = _open(path)
        if not len(self):
            raise DataError(f"dataset {path!r} has no rows")
        if prompt_key not in self.columns:
            near = difflib.get_close_matches(prompt_key, self.columns, 1)
            hint = f"did you mean data.prompt_key={near[0]}?" if near else "set data.prompt_key"
            raise DataError(f"{path} has no column {prompt_key!r}; it has {', '.join(self.columns) or 'none'}: {hint}")

    def __len__(self) -> int:
        return len(self._file)

    def __getitem__(self, index: int) -> PromptExample:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has no row {index}: it has {len(self)} rows")
        return self._example(self._file.row(index), index)

    def __iter__(self) -> Iterator[PromptExample]:
        return (self[index] for index in range(len(self)))

    @property
    def columns(self) -> list[str]:
        """The file's own columns; of jsonl: the first row's."""
        return self._file.columns

    @cached_property
    def digest(self) -> str:
        """xxh3-128 (hex) over the file."""
        state = xxhash.xxh3_128()
        with open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                state.update(block)
        return state.hexdigest()

    def _example(self, row: dict[str, Any], index: int) -> PromptExample:
        if self._prompt_key not in row:
            raise DataError(f"{self.path}, row {index}: no {self._prompt_key!r}; it has {', '.join(row) or 'nothing'}")
        grading = row.get("reward_model") or {}
        if not isinstance(grading, dict):
            raise DataError(f"{self.path}, row {index}: reward_model is not an object (got {str(grading)[:60]!r})")
        truth = grading.get("ground_truth", "")
        extra = row.get("extra_info")
        extra = dict(extra) if isinstance(extra, dict) else {} if extra is None else {"extra_info": extra}
        further = {name: row[name] for name in row if name not in (*_KNOWN, self._prompt_key) or name == "ability"}
        return PromptExample(
            prompt=_prompt(row[self._prompt_key], f"{self.path}, row {index}"),
            data_source=str(row.get("data_source") or ""),
            ground_truth=truth if isinstance(truth, str) else _json(truth),
            extra_info=_json({**further, **extra}),
        )


def load_rows(path: str, prompt_key: str = "prompt") -> list[PromptExample]:
    """All rows of a file. Raises as `Dataset`."""
    return list(Dataset(path, prompt_key))


def _prompt(value: Any, where: str) -> Messages | str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        raise DataError(
            f"{where}: the prompt is neither text nor a list of {{role, content}} (got {str(value)[:60]!r})"
        )
    # Parquet gives every message all fields that any message has.
    return [{key: part for key, part in message.items() if part is not None} for message in value]


class _Parquet:
    """Columns in memory; a row becomes Python objects when asked for."""

    def __init__(self, file: Path) -> None:
        self._table = pq.read_table(file).combine_chunks()
        self.columns = self._table.column_names

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]


class _Lines:
    """One JSON object per line; a line is parsed when asked for, so that rows may differ in their types."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lines = [line for line in file.read_bytes().splitlines() if line.strip()]
        self.columns = list(self.row(0)) if self._lines else []

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> dict[str, Any]:
        try:
            row = json.loads(self._lines[index])
        except ValueError as error:
            raise DataError(f"{self._file}, row {index}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{self._file}, row {index}: not an object (got {str(row)[:60]!r})")
        return row


def _open(path: str) -> _Parquet | _Lines:
    file = Path(path)
    if not file.is_file():
        what = "is a directory, not a file" if file.is_dir() else "does not exist"
        raise DataError(f"dataset {path!r} {what}")
    if file.suffix not in _SUFFIXES:
        raise DataError(f"dataset {path!r}: its name must end with {', '.join(_SUFFIXES)}")
    try:
        return _Parquet(file) if file.suffix == ".parquet" else _Lines(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"dataset {path!r} cannot be read: {str(error).splitlines()[0]}") from None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (date, datetime)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")
