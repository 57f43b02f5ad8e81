"""A checkpoint is made in two parts: a copy of the state, for which training waits, and its writing, for which not.

See checkpoint.py for what is written.
"""

import contextlib
import errno
import functools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash
from torch import nn

from shared.failpoints import hit
from shared.places import Local, Place, place
from shared.rpc.role import SavedCheckpoint

from .checkpoint import FORMAT, MANIFEST, STATE, tensors_of, torch_random_state
from .device import wait_for_copies
from .errors import CheckpointError
from .files import replacing
from .group import Group
from .image import Image
from .optimizer import Optimizer
from .parallel import ONE, Parallel
from .regions import is_writer, local, region_of
from .role import compute
from .shards import LAYOUT, MODEL, OPTIMIZER, RNG, on_all, rank_directory


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk."""

    digest: str
    """xxh3-128 of the manifest, which holds the digests of everything else."""
    bytes: int
    """Of all files."""


class StateCopy:
    """A role's state at rest, in main memory; taken again and again into the same memory.

    In a group all ranks take and write together, each its own part.

    Attributes:
        version: the optimizer step of the copy; -1: there is none.
    """

    def __init__(self, role: str) -> None:
        self.version = -1
        self._role = role
        self._images = {name: Image() for name in (MODEL, OPTIMIZER, RNG)}
        self._texts: dict[str, bytes] = {}
        self._group: Group | None = None

    def take(
        self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], parallel: Parallel = ONE
    ) -> "StateCopy":
        """Copies model, optimizer, torch's random state and `state` (JSON values); rank 0's `state` counts.

        Raises:
            MemoryError: main memory does not suffice for a copy.
        """
        self.version = -1
        tensors, moments, group = tensors_of(model), optimizer.state(), parallel.group
        self._texts = {STATE: _json({**state, "optimizer_steps": optimizer.steps})}
        if group.size > 1:
            self._group = _beside(group)
            tensors = {name: tensor for name, tensor in tensors.items() if is_writer(tensor, parallel)}
            moments = {key: tensor for key, tensor in moments.items() if key.partition("/")[2] in tensors}
            regions = {name: region_of(tensor) for name, tensor in tensors.items()}
            self._texts[LAYOUT] = _json(
                {name: {"shape": region.shape, "offsets": region.offsets} for name, region in regions.items()}
            )
        else:
            self._group = group
        self._images[MODEL].fill({name: local(tensor) for name, tensor in tensors.items()})
        self._images[OPTIMIZER].fill(moments)
        self._images[RNG].fill(torch_random_state())
        wait_for_copies([*map(local, tensors.values()), *moments.values()])
        self.version = optimizer.steps
        hit("checkpoint.staged")
        return self

    async def save(self, directory: str) -> SavedCheckpoint:
        """As `write`, in a thread, for a role."""
        saved = await compute(self.write, place(directory))
        return SavedCheckpoint(saved.digest, saved.bytes, self.version)

    def write(self, directory: Place) -> Saved:
        """Writes the copy as `directory`, replacing one there; in a group, in a place that all ranks see.

        Raises:
            CheckpointError: it could not be written (disk full, no permission); nothing is left behind.
        """
        group = self._group
        if group is None or self.version < 0:
            raise CheckpointError("there is no copy of the state to write")
        hit("checkpoint.write")
        needed = sum(group.exchange(self._size))
        with contextlib.ExitStack() as stack:

            def begin() -> str:
                if group.rank:
                    return ""
                with _written(directory, needed):
                    _refuse_full_disk(directory, needed)
                    return str(stack.enter_context(_draft_of(directory)))

            def write() -> dict[str, Any]:
                with _written(directory, needed):
                    return self._write_part(draft, group)

            def finish() -> None:
                if group.rank == 0:
                    hit("checkpoint.manifest")
                    with _written(directory, needed), stack.pop_all():
                        _refuse_unseen(draft, files)
                        (draft / MANIFEST).put(memoryview(manifest))

            draft = place(group.exchange(on_all(group, begin))[0])
            files = {name: fact for part in group.exchange(on_all(group, write)) for name, fact in part.items()}
            manifest = self._manifest(files, group.size)
            on_all(group, finish)
        size = len(manifest) + sum(fact["bytes"] for fact in files.values())
        return Saved(xxhash.xxh3_128_hexdigest(manifest), size)

    @property
    def _size(self) -> int:
        return sum(len(content) for content in self._contents().values())

    def _contents(self) -> dict[str, memoryview]:
        images = {name: image.content for name, image in self._images.items()}
        return images | {name: memoryview(text) for name, text in self._texts.items()}

    def _write_part(self, draft: Place, group: Group) -> dict[str, Any]:
        """This rank's files, and what the manifest says of them."""
        own = f"{rank_directory(group.rank)}/" if group.size > 1 else ""
        facts = {}
        for name, content in self._contents().items():
            if name == STATE and group.rank:
                continue
            path = STATE if name == STATE else f"{own}{name}"
            facts[path] = {"bytes": len(content), "xxh3_128": (draft / path).put(content)}
        return facts

    def _manifest(self, files: Mapping[str, Any], ranks: int) -> bytes:
        content = {"format": FORMAT, "role": self._role, "files": files}
        return _json(content | ({"ranks": ranks} if ranks > 1 else {}))


@functools.lru_cache(maxsize=1)
def _beside(group: Group) -> Group:
    """For what is exchanged while commands are, too. One for all runs: it costs sockets."""
    return group.beside()


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()


@contextlib.contextmanager
def _draft_of(directory: Place) -> Iterator[Place]:
    """Where to write what is to be `directory`, whole or not at all."""
    if isinstance(directory, Local):
        with replacing(directory.path) as draft:
            yield Local(draft)
        return
    # There is no rename: an older one goes before its files could be taken for some of the new one.
    (directory / MANIFEST).remove()
    directory.remove()
    try:
        yield directory
    except BaseException:
        with contextlib.suppress(OSError):
            directory.remove()
        raise


@contextlib.contextmanager
def _written(directory: Place, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        room = f" (it needs {needed} bytes)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CheckpointError(f"checkpoint {str(directory)!r} could not be written: {error}{room}") from error


def _refuse_unseen(draft: Place, files: Iterable[str]) -> None:
    """Ranks of several machines may each have written to a disk of their own: nobody could load that."""
    if isinstance(draft, Local) and (unseen := [name for name in files if not (draft / name).exists()]):
        raise CheckpointError(
            f"{str(draft / unseen[0])!r} was written by another rank and is not seen by rank 0: the run's directory, "
            "or checkpoint.directory, has to be one that all ranks see"
        )


def _refuse_full_disk(directory: Place, needed: int) -> None:
    """Before anything is written: a disk that is full of half a checkpoint has no room for the journal either."""
    if not isinstance(directory, Local):
        return
    there = next(parent for parent in directory.path.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise CheckpointError(
            f"checkpoint {str(directory)!r} could not be written: No space left on device: "
            f"it needs {needed} bytes and {free} are free: free some, or lower checkpoint.keep"
        )
