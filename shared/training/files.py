"""Directories that appear whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shared.failpoints import hit
from shared.places import fsync


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Gives a draft directory to fill; when the body is done it is synced to disk and becomes `directory`.

    An older directory of that name is replaced. When the body raises, the draft is removed and nothing has changed.
    One process at a time may write a directory.
    """
    draft = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    # What an earlier process left when it was killed in the middle.
    for leftover in directory.parent.glob(f".{directory.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        yield draft
        for path in draft.iterdir():
            fsync(path)
        fsync(draft)
        hit("directory.rename")
        _take_place(draft, directory)
        hit("directory.done")
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _take_place(draft: Path, directory: Path) -> None:
    """Rename does not replace a directory that has files: an older one steps aside first."""
    old = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    with contextlib.suppress(FileNotFoundError):
        directory.rename(old)
    draft.rename(directory)
    fsync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)
