"""Where checkpoints lie: a directory that all machines see, or a prefix of an S3-compatible store (`s3://bucket/prefix`).

A store has no rename: what is written there counts once its last file is there, as the readers of it know.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import xxhash

CHUNK = 1 << 22
PART = 32 << 20
"""Bytes of one part of an upload."""
S3 = "s3://"


class Place(Protocol):
    """A directory or a file. Everything blocks, and raises OSError when it can't be done."""

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> "Place": ...

    def __truediv__(self, name: str) -> "Place": ...

    def exists(self) -> bool: ...

    def children(self) -> list[str]:
        """Names of what lies in it; none when there is no such directory."""
        ...

    def read(self) -> bytes: ...

    def write(self, content: bytes) -> None:
        """A small file: all of it or nothing, durable."""
        ...

    def put(self, content: memoryview) -> str:
        """A file, durable, in a directory that nobody reads yet; answers the xxh3-128 (hex) of what it was given.

        Digest and writing leave the interpreter to other threads.
        """
        ...

    def remove(self) -> None:
        """With all that is in it, if it is there."""
        ...


class Local:
    """On this machine, or on what is mounted here."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> "Local":
        return Local(self.path / name)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> "Local":
        return Local(self.path.parent)

    def exists(self) -> bool:
        return self.path.exists()

    def children(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in self.path.iterdir())
        return []

    def read(self) -> bytes:
        return self.path.read_bytes()

    def write(self, content: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, content)

    def put(self, content: memoryview) -> str:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("wb", buffering=0) as file:
            digest = _copy(content, file)
            os.fsync(file.fileno())
        return digest

    def remove(self) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)


class Remote:
    """In a store. Credentials and endpoint are the environment's: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ..."""

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path.rstrip("/")

    def __str__(self) -> str:
        return S3 + self._path

    def __truediv__(self, name: str) -> "Remote":
        return Remote(self._files, f"{self._path}/{name}")

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> "Remote":
        return Remote(self._files, self._path.rpartition("/")[0])

    def exists(self) -> bool:
        with _as_os_error(self):
            return self._files.exists(self._path)

    def children(self) -> list[str]:
        with _as_os_error(self):
            try:
                found = self._files.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def read(self) -> bytes:
        with _as_os_error(self):
            return self._files.cat_file(self._path)

    def write(self, content: bytes) -> None:
        with _as_os_error(self):
            self._files.pipe_file(self._path, content)

    def put(self, content: memoryview) -> str:
        with _as_os_error(self), self._files.open(self._path, "wb", block_size=PART) as file:
            return _copy(content, file)

    def fetch(self, to: Path) -> None:
        """Copies all that is in it into a directory of this machine."""
        with _as_os_error(self):
            self._files.get(self._path, str(to), recursive=True)

    def remove(self) -> None:
        with _as_os_error(self), contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path, recursive=True)


def place(where: str | Path) -> Place:
    """What a path, or `s3://bucket/prefix`, names.

    Raises:
        ValueError: another kind of address, no bucket, or an extra that is not installed.
    """
    text = str(where)
    if isinstance(where, Path) or "://" not in text:
        return Local(Path(where))
    bucket, _, prefix = text.removeprefix(S3).partition("/")
    if not text.startswith(S3) or not bucket or not prefix.strip("/"):
        raise ValueError(f"{text!r} is no place for checkpoints: give a directory, or s3://bucket/prefix")
    try:
        import s3fs
    except ImportError:
        raise ValueError(f"{text!r} needs the extra s3: pip install 'sextet[s3]' where the role runs") from None
    # Others write there, too: what was listed before says nothing.
    return Remote(s3fs.S3FileSystem(use_listings_cache=False), f"{bucket}/{prefix}")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a small file so that a reader sees all of it or none."""
    draft = path.with_name(f".{path.name}.new")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Makes a file's bytes, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy(content: memoryview, file: BinaryIO) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, len(content), CHUNK):
        left = content[start : start + CHUNK]
        digest.update(left)
        while left:
            left = left[file.write(left) :]
    return digest.hexdigest()


@contextlib.contextmanager
def _as_os_error(where: Remote) -> Iterator[None]:
    """What the store's client says, as what a disk would."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: {error}") from error
    except Exception as error:
        raise OSError(f"{where}: {type(error).__name__}: {error}") from error
