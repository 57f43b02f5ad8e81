"""Commands whose work is done end well, whatever becomes of what they show of it; those that can't begin say why."""

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sextet import cli
from sextet.endpoint import LocalState, made_at, write_state
from sextet.progress import Progress
from sextet.report import picture
from shared.gen.sextet.v1 import common_pb2
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.rpc.errors import Unavailable


def test_a_run_whose_flow_tells_no_reward_has_no_picture(tmp_path: Path) -> None:
    """A flow of the user's own: `sextet run` ended of a ValueError of matplotlib's when the run was done."""
    pytest.importorskip("matplotlib")
    progress = Progress("r", "name", 1)
    progress.feed(pb.RunEvent(kind="step", step=1, message="step 1 of 1", metrics={"seconds": 1.0}))
    assert picture(progress, tmp_path / "reward.png") is None


def test_a_directory_that_takes_no_picture_costs_only_that(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    progress = Progress("r", "name", 1)
    progress.feed(pb.RunEvent(kind="step", step=1, message="step 1 of 1", metrics={"seconds": 1.0, "reward": 0.5}))
    assert picture(progress, tmp_path / "gone" / "reward.png") is None


class FakeClient:
    """Knows one profile, which has no trace."""

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *error: object) -> None: ...

    def profile(self, *_: Any) -> list[pb.CallProfile]:
        rank = common_pb2.RankProfile(fault=f"OSError: {os.strerror(28)}")
        return [pb.CallProfile(step=1, call="actor.update", replica="actor-0", ranks=[rank])]


def test_profiles_without_a_trace_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full where the traces go: the command ended of an IndexError."""
    monkeypatch.setattr(cli, "Client", FakeClient)
    shown = CliRunner().invoke(cli.app, ["profile", "r"])
    assert (shown.exception, shown.exit_code) == (None, 0)
    assert "No space left on device" in shown.stdout


def test_services_that_are_still_starting_have_no_endpoint_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway was given an empty URL of Redis, and ended in a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEXTET_REDIS_URL", raising=False)
    monkeypatch.setattr(os, "execv", lambda *command: pytest.fail(f"started: {command}"))
    write_state(LocalState(os.getpid(), made_at(os.getpid())))
    assert isinstance(CliRunner().invoke(cli.app, ["openai"]).exception, Unavailable)
