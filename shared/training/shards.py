"""Checkpoints of several ranks: each rank writes what it alone holds, and reads what it needs from whoever wrote it.

    checkpoint/
        rank-0/ model.safetensors optimizer.safetensors rng.safetensors layout.json
        rank-1/ ...
        state.json
        manifest.json       digests of all files; written last, by rank 0

A layout says which box of which tensor a file holds, so that another number of ranks can read it, or one process.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import CheckpointError, DamagedError
from .group import Group
from .optimizer import MOMENTS
from .regions import Region

T = TypeVar("T")
LAYOUT, MODEL, OPTIMIZER, RNG = "layout.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors"


def rank_directory(rank: int) -> str:
    return f"rank-{rank}"


@dataclass(frozen=True)
class Pieces:
    """What files hold of each tensor: the file, the tensor's name in it, and the box."""

    found: dict[str, list[tuple[Path, Region]]]

    def read(self, name: str, wanted: Region, dtype: torch.dtype) -> Tensor:
        """A box of a tensor.

        Raises:
            DamagedError: it is not there, not whole, or of another shape or dtype.
        """
        if name not in self.found:
            raise DamagedError(f"the checkpoint is of another model: it has no {name!r}")
        result, filled = torch.empty(wanted.sizes, dtype=dtype), 0
        for file, held in self.found[name]:
            if held.shape != wanted.shape:
                raise DamagedError(f"{str(file)!r} is of another model: {name!r} is {list(held.shape)}")
            common = wanted.overlap(held)
            if not common.empty:
                with safe_open(file, "pt") as opened:
                    part = opened.get_slice(name)[common.within(held)] if held.shape else opened.get_tensor(name)
                if part.dtype != dtype:
                    raise DamagedError(f"{str(file)!r} is of another model: {name!r} is {part.dtype}")
                result[common.within(wanted)] = part
                filled += part.numel()
        if filled != result.numel():
            raise DamagedError(f"the checkpoint has only {filled} of {result.numel()} elements of {name!r}")
        return result


def model_pieces(directory: Path) -> Pieces:
    """The model's tensors in all files of a checkpoint, of however many ranks."""
    return _pieces(directory, MODEL, lambda name: [name])


def optimizer_pieces(directory: Path) -> Pieces:
    """The moments; each lies where its parameter lies."""
    return _pieces(directory, OPTIMIZER, lambda name: [f"{moment}/{name}" for moment in MOMENTS if moment != "step"])


def optimizer_counts(directory: Path) -> dict[str, Tensor]:
    """AdamW's own step counts, by parameter."""
    counts = {}
    for file in _files(directory, OPTIMIZER):
        with safe_open(file, "pt") as opened:
            keys = [key for key in opened.keys() if key.startswith("step/")]  # noqa: SIM118 - no dictionary
            counts |= {key: opened.get_tensor(key) for key in keys}
    return counts


def _pieces(directory: Path, kind: str, names: Callable[[str], list[str]]) -> Pieces:
    found: dict[str, list[tuple[Path, Region]]] = {}
    for file in _files(directory, kind):
        with safe_open(file, "pt") as opened:
            keys = set(opened.keys())
            for name, (shape, offsets) in _layout(file.parent, keys).items():
                for key in keys.intersection(names(name)):
                    sizes = tuple(opened.get_slice(key).get_shape())
                    found.setdefault(key, []).append(
                        (file, Region(shape or sizes, offsets or (0,) * len(sizes), sizes))
                    )
    return Pieces(found)


def _layout(directory: Path, keys: set[str]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shape and offsets by parameter; a checkpoint of one process has no layout: its tensors are whole."""
    if not (directory / LAYOUT).exists():
        return dict.fromkeys({key.partition("/")[2] or key for key in keys}, ((), ()))
    layout = json.loads((directory / LAYOUT).read_text())
    return {name: (tuple(place["shape"]), tuple(place["offsets"])) for name, place in layout.items()}


def _files(directory: Path, kind: str) -> list[Path]:
    return [directory / kind] if (directory / kind).exists() else sorted(directory.glob(f"rank-*/{kind}"))


@contextlib.contextmanager
def as_checkpoint_error(what: str) -> Iterator[None]:
    """What the disk or a file's format says, in this package's words."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{what}: {error}") from error


def on_all(group: Group, work: Callable[[], T], kind: type[Exception] = CheckpointError) -> T:
    """Does something on every rank; if it failed on one, all of them raise the first failure, as `kind`,
    or as DamagedError if that is what it was.

    Raises:
        CheckpointError: also for what only another rank saw.
    """
    result, failure, damaged = None, "", False
    try:
        result = work()
    except Exception as error:
        if group.size == 1:
            raise
        # Whatever it was, the others wait to hear of it.
        failure = str(error) if isinstance(error, kind) else f"{type(error).__name__}: {error}"
        damaged = isinstance(error, DamagedError)
    for rank, (said, of_damage) in enumerate(group.exchange((failure, damaged))):
        if said:
            raise (DamagedError if of_damage else kind)(f"{said} (rank {rank})")
    return result  # pyright: ignore[reportReturnType]
