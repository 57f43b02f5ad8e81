"""Checkpoints: written completely or not at all, verified before they are read.

A checkpoint is a directory of safetensors and JSON files with `manifest.json`, which holds every file's digest and is
written last. All is written beside the final directory, synced to disk and renamed, so a directory of that name is
whole. There is no pickle anywhere. Here they are read; saving.py writes them.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shared.places import Place

from .errors import CheckpointError, DamagedError
from .fetching import fetched
from .optimizer import Optimizer
from .parallel import ONE, Parallel
from .regions import local, region_of
from .shards import (
    LAYOUT,
    MODEL,
    OPTIMIZER,
    RNG,
    as_checkpoint_error,
    model_pieces,
    on_all,
    optimizer_counts,
    optimizer_pieces,
    rank_directory,
)

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"


def load(
    directory: Place, model: nn.Module, optimizer: Optimizer, *, role: str, parallel: Parallel = ONE
) -> dict[str, Any]:
    """Verifies `directory`, then puts its contents into model, optimizer and torch's random state, bit for bit.

    The checkpoint may be of another number of ranks, or of one process: each rank reads what it holds. Of a store, one
    rank of each machine fetches all of it first.

    Returns:
        The `state` that was saved, and `optimizer_steps`.

    Raises:
        DamagedError: a file is missing, torn, changed, or made for another role or model, or the optimizer's state of
            a parameter is not there; model, optimizer and random state are unchanged.
        CheckpointError: a file can't be read; as unchanged.
    """
    group = parallel.group
    with fetched(directory, group) as here:
        on_all(group, lambda: verify(here.path, role=role, part=here.part, parts=here.parts))
        live = tensors_of(model)
        names = set(live).union(*group.exchange(list(live))) if parallel.pp > 1 else set(live)
        read = on_all(group, lambda: _read(here.path, live, names, optimizer, group.rank))
    state, tensors, moments, random_state = read
    optimizer.load_state(moments, state["optimizer_steps"])
    with torch.no_grad():
        for name, tensor in tensors.items():
            local(live[name]).copy_(tensor)
    _set_random_state(random_state)
    return state


def verify(directory: Path, *, role: str, part: int = 0, parts: int = 1) -> None:
    """Checks that every file is there and has the digest in the manifest.

    Args:
        part: of `parts` shares of the files, the one that is checked here.

    Raises:
        DamagedError: naming the file; CheckpointError: it can't be read.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        files = {name: str(fact["xxh3_128"]) for name, fact in dict(manifest["files"]).items()}
        made_by = (manifest["format"], manifest["role"])
        ranks = int(manifest.get("ranks", 1))
    except FileNotFoundError:
        raise DamagedError(f"{str(directory)!r} is no complete checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} can't be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{str(path)!r} is damaged: {error}") from None
    if made_by != (FORMAT, role):
        raise DamagedError(f"{str(directory)!r} has format and role {made_by}; wanted {(FORMAT, role)}")
    wanted = _file_names(ranks)
    if missing := wanted - files.keys():
        raise DamagedError(f"{str(path)!r} does not list {min(missing)}")
    for name in sorted(files)[part::parts]:
        if name not in wanted or not (directory / name).is_file():
            raise DamagedError(f"checkpoint file {str(directory / name)!r} is missing")
        if _digest(directory / name) != files[name]:
            raise DamagedError(f"checkpoint file {str(directory / name)!r} is damaged: its digest is another")


def _file_names(ranks: int) -> set[str]:
    """What a checkpoint of so many ranks consists of, besides its manifest."""
    if ranks == 1:
        return {MODEL, OPTIMIZER, RNG, STATE}
    names = (MODEL, OPTIMIZER, RNG, LAYOUT)
    return {STATE, *(f"{rank_directory(rank)}/{name}" for rank in range(ranks) for name in names)}


def _read(
    directory: Path, live: Mapping[str, Tensor], names: Collection[str], optimizer: Optimizer, rank: int
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """State, this rank's part of model and moments, and random state; verified files, but maybe of another model."""
    with as_checkpoint_error(f"checkpoint {str(directory)!r} can't be read"):
        state = json.loads((directory / STATE).read_text())
        if not isinstance(state, dict) or not isinstance(state.get("optimizer_steps"), int):
            raise DamagedError(f"{str(directory / STATE)!r} is damaged: it does not say optimizer_steps")
        held = model_pieces(directory)
        if wrong := sorted(held.found.keys() ^ names):
            raise DamagedError(f"{str(directory / MODEL)!r} is of another model: it differs in {wrong[0]!r}")
        tensors = {name: held.read(name, region_of(tensor), tensor.dtype) for name, tensor in live.items()}
        pieces, counts = optimizer_pieces(directory), optimizer_counts(directory)
        # What belongs to other stages is theirs to read; what belongs to none is wrong.
        keys = [key for key in [*counts, *pieces.found] if _parameter(key) in live or _parameter(key) not in names]
        optimizer.check_names(keys, state["optimizer_steps"])
        moments = {key: counts[key] for key in keys if key in counts}
        for key in keys:
            if key in pieces.found:
                parameter = live[_parameter(key)]
                moments[key] = pieces.read(key, region_of(parameter), parameter.dtype)
        file = directory / RNG
        if not file.exists():
            # Of fewer ranks: nothing here draws from torch's generator, and whoever does gets a defined state.
            mine = directory / rank_directory(rank) / RNG
            file = mine if mine.exists() else directory / rank_directory(0) / RNG
        return state, tensors, moments, _read_random_state(file)


def _parameter(key: str) -> str:
    """Whose moment is called so."""
    return key.partition("/")[2]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and persistent buffers."""
    parameters = dict(model.named_parameters())
    saved = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    # A sharded parameter's part is contiguous; the call would make it another kind of tensor.
    return {
        name: tensor.detach() if isinstance(tensor, DTensor) else tensor.detach().contiguous()
        for name, tensor in {**parameters, **buffers}.items()
    }


def torch_random_state() -> dict[str, Tensor]:
    """Torch's, of the CPU and all GPUs."""
    devices = range(torch.cuda.device_count())
    return {"cpu": torch.get_rng_state(), **{f"cuda{i}": torch.cuda.get_rng_state(i) for i in devices}}


def _read_random_state(file: Path) -> dict[str, Tensor]:
    """What `_set_random_state` can set: tried here, before anything is changed."""
    tensors = load_file(file)
    for name, generator in _generators(tensors).items():
        try:
            generator.set_state(tensors[name])
        except KeyError:
            raise DamagedError(f"{str(file)!r} is damaged: it has no {name!r}") from None
        except (RuntimeError, TypeError) as error:
            raise DamagedError(f"{str(file)!r} is damaged: {name!r} is no random state: {error}") from None
    return tensors


def _generators(tensors: Mapping[str, Tensor]) -> dict[str, torch.Generator]:
    """Fresh ones, of the CPU and of those GPUs whose state is there."""
    devices = {f"cuda{i}": torch.device("cuda", i) for i in range(torch.cuda.device_count()) if f"cuda{i}" in tensors}
    return {name: torch.Generator(device) for name, device in {"cpu": torch.device("cpu"), **devices}.items()}


def _set_random_state(tensors: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda{index}"], index)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()
