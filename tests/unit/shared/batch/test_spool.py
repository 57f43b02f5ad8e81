"""What is spooled is there again for another process, whole and verified, or not at all; within its bytes."""

from pathlib import Path

import numpy as np
import pytest

from shared.batch.block import Block, Ragged, RowKey
from shared.batch.spool import Spool

ROWS = (RowKey("1:4:0", 0), RowKey("1:4:0", 1))


def block(rows: tuple[RowKey, ...] = ROWS, value: int = 7, length: int = 3) -> Block:
    return Block(rows, {"response_ids": Ragged.from_rows([np.full(length, value)] * len(rows), "int32")})


def opened(path: Path, run: str = "r", content: str = "c", max_bytes: int = 10**6) -> Spool:
    spool = Spool(path, max_bytes)
    spool.open(run, content)
    return spool


def files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file())


def test_another_process_finds_it_bit_for_bit(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.add(1, "0", block())
    for spool in (first, second, opened(tmp_path)):
        (found,) = spool.find(1, "0", ROWS[1:])
        assert found.digest() == block().digest()
    assert list(second.find(1, "0", [RowKey("other", 0)])) == []
    assert list(second.find(1, "1", ROWS)) == [] == list(second.find(2, "0", ROWS))


def test_another_run_or_configuration_finds_nothing(tmp_path: Path) -> None:
    opened(tmp_path).add(1, "0", block())
    assert list(opened(tmp_path, content="d").find(1, "0", ROWS)) == []
    assert list(opened(tmp_path, run="../r").find(1, "0", ROWS)) == []


def test_before_a_run_is_opened_nothing_is_kept(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10**6)
    assert not spool.add(1, "0", block())
    assert list(spool.find(1, "0", ROWS)) == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_what_is_damaged_is_as_if_it_had_never_been(tmp_path: Path, damage: str) -> None:
    opened(tmp_path).add(1, "0", block())
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
    path.write_bytes(data[: {"cut": 30, "flipped": len(data), "empty": 0}[damage]])
    assert list(opened(tmp_path).find(1, "0", ROWS)) == []


def test_release_removes_steps_and_runs(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    for step in (1, 2, 10):
        spool.add(step, "0", block())
    spool.release("another", None)
    spool.release("r", 2)
    assert [path.parent.name for path in files(tmp_path)] == ["10"]
    assert list(spool.find(2, "0", ROWS)) == []
    spool.release("r", None)
    assert files(tmp_path) == []
    assert not spool.add(1, "0", block())


def test_another_runs_blocks_stay_until_that_run_is_released(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.add(1, "0", block())
    spool.open("another", "")
    spool.add(1, "0", block())
    spool.release("another", None)
    assert len(files(tmp_path)) == 1
    assert len(list(opened(tmp_path).find(1, "0", ROWS))) == 1
    spool.release("r", None)
    assert files(tmp_path) == []


def test_the_oldest_go_first_and_never_those_of_the_same_step(tmp_path: Path) -> None:
    size = len(files_of_one(tmp_path / "one"))
    spool = opened(tmp_path / "spool", max_bytes=3 * size)
    for step in (1, 2, 3, 4):
        assert spool.add(step, "0", block())
    assert sorted(path.parent.name for path in files(tmp_path / "spool")) == ["2", "3", "4"]
    for _ in range(2):
        assert spool.add(4, "0", block())
    assert not spool.add(4, "0", block())
    assert [path.parent.name for path in files(tmp_path / "spool")] == ["4"] * 3


def files_of_one(path: Path) -> bytes:
    opened(path).add(1, "0", block())
    return files(path)[0].read_bytes()


def test_a_disk_that_takes_nothing_costs_the_block_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = opened(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        assert not spool.add(1, "0", block())
    assert files(tmp_path) == []
    assert spool.add(1, "0", block())
