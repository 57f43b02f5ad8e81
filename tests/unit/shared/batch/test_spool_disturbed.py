"""Disks that fail, and others that remove what is looked at: work goes on."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.batch import codec
from shared.batch.block import Block, Ragged, RowKey
from shared.batch.spool import Spool

ROWS = (RowKey("1:4:0", 0), RowKey("1:4:0", 1))
BLOCK = Block(ROWS, {"response_ids": Ragged.from_rows([np.full(3, 7)] * 2, "int32")})


def opened(path: Path) -> Spool:
    spool = Spool(path, 10**6)
    spool.open("r", "c")
    return spool


def files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file())


def test_where_nothing_can_be_written_work_goes_on_without_it(tmp_path: Path) -> None:
    """Regression: the error in clearing away what was not written ended the call whose rows they were."""
    spool = opened(tmp_path)
    spool.add(1, "0", BLOCK)
    [run] = tmp_path.iterdir()
    run.rename(tmp_path / "away")
    run.write_text("no directory")
    assert not spool.add(1, "0", BLOCK)
    assert list(spool.find(1, "0", ROWS)) == []
    assert spool.steps(0, 5) == []
    spool.release("r", 1)
    opened(tmp_path)


def test_a_directory_that_can_not_be_looked_at_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a replica on the same disk that released a step ended another one's Configure."""
    opened(tmp_path).add(1, "0", BLOCK)
    [block] = files(tmp_path)
    scandir = os.scandir

    def gone(path: Any = ".") -> Any:
        if Path(path) == block.parent:
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gone)
    spool = opened(tmp_path)
    assert list(spool.find(1, "0", ROWS)) == []


def test_a_run_that_is_released_while_a_block_is_packed_gets_it_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, to_bytes = opened(tmp_path), codec.to_bytes

    def released_meanwhile(block: Block) -> bytes:
        spool.release("r", None)
        return to_bytes(block)

    monkeypatch.setattr(codec, "to_bytes", released_meanwhile)
    assert not spool.add(1, "0", BLOCK)
    assert files(tmp_path) == []


def test_a_step_is_released_while_another_thread_keeps_a_block(tmp_path: Path) -> None:
    """Regression: "dictionary changed size during iteration" ended the release, or the call whose rows they were."""
    spool = opened(tmp_path)
    spool.add(1, "0", BLOCK)
    adding = threading.Thread(target=spool.add, args=(2, "0", BLOCK))

    class Disturbing(type(tmp_path)):
        """A path of a block; who looks at it gives the other thread its turn."""

        @property
        def parent(self) -> Path:
            adding.start()
            adding.join(0.5)
            return Path("1")

    spool._rows = {Disturbing(): frozenset(), **spool._rows}
    spool.release("r", 1)
    adding.join()
    assert len(list(spool.find(2, "0", ROWS))) == 1
