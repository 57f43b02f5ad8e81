"""Blocks on disk: what must not be made a second time while that disk lives. Bounded, synced, verified when read."""

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import structlog
import xxhash
from google.protobuf.message import DecodeError
from prometheus_client import Counter

from shared.batch import codec
from shared.batch.block import Block
from shared.batch.columns import RowKey
from shared.failpoints import hit

log = structlog.get_logger()
UNKEPT = Counter("sextet_spool_unkept_total", "Blocks that could not be kept on disk.")
_SUFFIX = ".block"
_DIGEST_BYTES = 16


class Spool:
    """Blocks of one run at a time, by step and label. Processes that share the directory see each other's.

    A file is an xxh3-128 digest and the block (`codec.to_bytes`); it appears whole or not at all, and one that is
    damaged is as if it had never been. What cannot be kept (disk full, no room left) is logged and counted: work goes
    on without it. So is what can't be looked at. Safe to use from several threads.

    Args:
        directory: made when needed.
        max_bytes: of all files under it; the oldest go first, but never those of the step that is written to.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._root, self._max_bytes = directory, max_bytes
        self._home: Path | None = None
        self._run = ""
        # A file never changes: its rows are looked up without reading it again.
        self._rows: dict[Path, frozenset[RowKey]] = {}
        # An estimate, as others may write here, too: the files are counted again when it says that there is no room.
        self._held = 0
        self._lock = threading.Lock()

    def open(self, run: str, content: str) -> None:
        """From now on for this run; `content` is all that its blocks depend on, so that another's are not taken."""
        with self._lock:
            self._home, self._run, self._rows = self._root / _named(run) / _named(content), run, {}
            self._held = sum(size for _, size, _ in self._files())

    def add(self, step: int, label: str, block: Block) -> bool:
        """Keeps a block, on disk when this returns; whether it could."""
        home = self._home
        if home is None or not len(block):
            return False
        data = codec.to_bytes(block)
        data = xxhash.xxh3_128_digest(data) + data
        path = home / str(step) / f"{label}-{secrets.token_hex(6)}{_SUFFIX}"
        hit("spool.before_write")
        with self._lock:
            if self._home != home:
                return False
            try:
                if not self._make_room(len(data), path.parent):
                    raise OSError(f"{len(data)} bytes more are over {self._max_bytes}")
                _write(path, data)
                self._held += len(data)
            except OSError as error:
                UNKEPT.inc()
                log.error("block not kept on disk", path=str(path), error=str(error))
                # A disk that can't be written to may not be asked that, either.
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                return False
            self._rows[path] = frozenset(block.rows)
        hit("spool.after_write")
        return True

    def find(self, step: int, label: str, wanted: Collection[RowKey]) -> Iterator[Block]:
        """The kept blocks that hold any of these rows; the label may be a glob pattern."""
        home, rows = self._home, set(wanted)
        if home is None:
            return
        for path in _listed(home / str(step), f"{label}-*{_SUFFIX}"):
            known = self._rows.get(path)
            if known is not None and not known & rows:
                continue
            block = _read(path)
            found = frozenset(block.rows) if block else frozenset()
            with self._lock:
                self._rows[path] = found
            if block and found & rows:
                yield block

    def steps(self, first: int, end: int) -> list[int]:
        """The steps, from `first` to before `end`, of which anything is kept."""
        home = self._home
        if home is None:
            return []
        try:
            names = os.listdir(home)
        except OSError:
            return []
        return sorted(step for step in map(int, filter(str.isdecimal, names)) if first <= step < end)

    def release(self, run: str, up_to_step: int | None) -> None:
        """Removes the blocks of the open run's steps up to this one; None: all of any run."""
        if up_to_step is None:
            shutil.rmtree(self._root / _named(run), ignore_errors=True)
            with self._lock:
                if run == self._run:
                    self._home, self._run, self._rows = None, "", {}
            return
        home = self._home
        if home is None or run != self._run:
            return
        for step in self.steps(0, up_to_step + 1):
            shutil.rmtree(home / str(step), ignore_errors=True)
        with self._lock:
            self._rows = {path: rows for path, rows in self._rows.items() if int(path.parent.name) > up_to_step}

    def _make_room(self, size: int, keep: Path) -> bool:
        if self._held + size <= self._max_bytes:
            return True
        files = self._files()
        self._held = sum(each[1] for each in files)
        # More than is needed now, or every block from here on would have all files counted.
        room = max(size, self._max_bytes // 10)
        for _, freed, path in sorted(files):
            if self._held + room <= self._max_bytes:
                break
            if path.parent != keep:
                path.unlink(missing_ok=True)
                self._rows.pop(path, None)
                self._held -= freed
        return self._held + size <= self._max_bytes

    def _files(self) -> list[tuple[int, int, Path]]:
        """Time of writing (ns), bytes and path of all blocks."""
        files = []
        # Others remove directories meanwhile: `walk` passes over what it can't look at.
        for directory, _, names in os.walk(self._root):
            for path in (Path(directory, name) for name in names if name.endswith(_SUFFIX)):
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    files.append((stat.st_mtime_ns, stat.st_size, path))
        return files


def _listed(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except OSError as error:
        log.error("blocks on disk can't be looked for", path=str(directory), error=str(error))
        return []


def _named(text: str) -> str:
    """A directory's name: short, and the text can be anything."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    for directory in (path.parent, path.parent.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(path: Path) -> Block | None:
    try:
        data = path.read_bytes()
        if xxhash.xxh3_128_digest(data[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
            raise codec.Corrupt("its digest is another")
        return codec.from_bytes(data[_DIGEST_BYTES:])
    except FileNotFoundError:
        return None
    except (OSError, codec.Corrupt, codec.TooLarge, DecodeError) as error:
        log.error("a block on disk is damaged", path=str(path), error=str(error))
        return None
