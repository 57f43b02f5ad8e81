"""A directory and a prefix of a store behave alike; what is no place is said at once."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from shared import places
from shared.places import Place, place
from tests.fakes.s3 import serving


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with serving() as bucket:
        yield bucket


@pytest.fixture(params=["local", "s3"])
def root(request: Any, bucket: str, tmp_path: Path) -> Place:
    return place(tmp_path / "a" if request.param == "local" else f"{bucket}/{tmp_path.name}/a/")


def test_files_come_and_go(root: Place) -> None:
    assert (root.name, root.parent.name) == ("a", root.parent.name)
    assert not root.exists()
    assert root.children() == []
    root.remove()
    (root / "state.json").write(b"{}")
    content = memoryview(bytes(range(256)) * 40_000)
    assert (root / "rank-0/model").put(content) == xxhash.xxh3_128_hexdigest(content)
    assert root.children() == ["rank-0", "state.json"]
    assert (root / "state.json").read() == b"{}"
    assert (root / "rank-0" / "model").read() == content
    (root / "state.json").write(b"[]")
    assert (root / "state.json").read() == b"[]"
    (root / "state.json").remove()
    assert root.children() == ["rank-0"]
    with pytest.raises(FileNotFoundError):
        (root / "state.json").read()
    root.remove()
    assert not root.exists()
    assert str(place(str(root / "b"))) == str(root / "b")


def test_a_store_is_seen_as_others_have_left_it(bucket: str) -> None:
    mine, others = place(f"{bucket}/x"), place(f"{bucket}/x")
    assert mine.children() == []
    (others / "step_1/run.json").write(b"{}")
    assert mine.children() == ["step_1"]
    others.remove()
    assert mine.children() == []
    assert not (mine / "step_1/run.json").exists()


def test_an_upload_in_many_parts_is_whole(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PART", 5 << 20)
    content = memoryview(bytes(range(256)) * (12 << 12))
    file = place(f"{bucket}/parts/file")
    file.put(content)
    assert file.read() == content


@pytest.mark.parametrize("text", ["s3://", "s3://bucket", "s3://bucket/", "gs://bucket/x", "memory://x"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is no place for checkpoints: give a directory, or s3://bucket/pre"):
        place(text)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"'s3://b/x' needs the extra s3: pip install 'sextet\[s3\]'"):
        place("s3://b/x")


def test_a_bucket_that_is_not_there_is_an_error_that_names_it(bucket: str) -> None:
    with pytest.raises(OSError, match="nowhere/x"):
        place("s3://nowhere/x").write(b"")
