"""A checkpoint of a store as files of this machine, for as long as it is read."""

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shared.places import Local, Place, Remote

from .errors import CheckpointError, DamagedError
from .group import Group
from .shards import on_all


class Here(NamedTuple):
    """Where the files lie, and which share of them this rank checks: all that see them check all."""

    path: Path
    part: int
    parts: int


@contextlib.contextmanager
def fetched(directory: Place, group: Group) -> Iterator[Here]:
    """The checkpoint's files; of a store, one rank of each machine fetches them into the temporary directory.

    Raises:
        CheckpointError: it could not be fetched; and what the body raises, with the store's name in it.
    """
    if isinstance(directory, Local):
        yield Here(directory.path, group.rank, group.size)
        return
    machine = socket.gethostname()
    machines = group.exchange(machine)
    neighbours = [rank for rank, name in enumerate(machines) if name == machine]
    with contextlib.ExitStack() as stack:

        def fetch() -> str:
            if group.rank != neighbours[0]:
                return ""
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sextet-"))) / "checkpoint"
            _fetch(directory, scratch)
            return str(scratch)

        path = Path(group.exchange(on_all(group, fetch))[neighbours[0]])
        try:
            yield Here(path, neighbours.index(group.rank), len(neighbours))
        except CheckpointError as error:
            raise type(error)(str(error).replace(str(path), str(directory))) from error


def _fetch(directory: Place, to: Path) -> None:
    assert isinstance(directory, Remote)
    try:
        directory.fetch(to)
    except FileNotFoundError:
        raise DamagedError(f"{str(directory)!r} is no complete checkpoint: there is nothing") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {str(directory)!r} can't be fetched: {error}") from error
