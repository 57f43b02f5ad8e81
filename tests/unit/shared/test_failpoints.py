"""Failpoints do nothing unless named, and exactly what is named."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.failpoints import FailpointError, hit, hit_async, in_role


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEXTET_FAILPOINTS", raising=False)
    hit("a")
    monkeypatch.setenv("SEXTET_FAILPOINTS", "b=error")
    hit("a")


def test_error_and_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEXTET_FAILPOINTS", "a.b=error, c=sleep:0.1")
    with pytest.raises(FailpointError, match=r"a\.b"):
        hit("a.b")
    began = time.monotonic()
    hit("c")
    assert time.monotonic() - began >= 0.1


async def test_async_sleep_leaves_the_loop_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEXTET_FAILPOINTS", "c=sleep:0.5")
    began = time.monotonic()
    await asyncio.gather(*(hit_async("c") for _ in range(5)))
    assert 0.5 <= time.monotonic() - began < 2.5


def test_kill() -> None:
    code = "from shared.failpoints import hit; hit('x'); hit('y'); print('alive')"
    environ = {**os.environ, "SEXTET_FAILPOINTS": "y=kill"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.parametrize("text", ["a", "a=explode", "a=sleep", "a=sleep:x", "a=sleep:-1"])
def test_a_misspelt_one_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SEXTET_FAILPOINTS", text)
    with pytest.raises(ValueError, match="use kill, sleep:SECONDS or error"):
        hit("anything")


def test_an_armed_place_strikes_once_and_in_its_role_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SEXTET_FAILPOINTS", f"@{tmp_path}")
    hit("a")
    (tmp_path / "a@critic").write_text("error")
    (tmp_path / "a@actor").write_text("error\n")
    try:
        in_role("actor")
        with pytest.raises(FailpointError):
            hit("a")
        hit("a")
    finally:
        in_role("")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a@actor.struck", "a@critic"]
