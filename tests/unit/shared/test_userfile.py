"""Files that users name in a configuration."""

import os
from pathlib import Path

import pytest

from shared.userfile import load_file


def test_a_change_of_the_same_size_within_a_second_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for number in (1, 2):
        path.write_text(f"VALUE = {number}\n")
        os.utime(path, (1e9, 1e9))
        found = load_file(path, "test_userfile_").VALUE
        assert found == number


def test_what_the_file_raises(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        load_file(tmp_path / "bad.py", "test_userfile_")
    with pytest.raises(FileNotFoundError, match="nix"):
        load_file(tmp_path / "nix.py", "test_userfile_")


def test_a_dataclass_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass D:\n    a: int\n"
    )
    assert load_file(tmp_path / "data.py", "test_userfile_").D(3).a == 3
