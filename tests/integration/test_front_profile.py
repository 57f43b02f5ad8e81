"""`sextet profile` while a run plays: traces in the run's directory, a table, an event; and what can't be profiled."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Home

pytestmark = pytest.mark.timeout(300)
PLAYING_SECONDS = 60.0


def told(home: Home, *arguments: str) -> Any:
    """What a command answers as JSON."""
    ended = home.sextet(*arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def playing(home: Home) -> dict[str, Any]:
    """A long run that has done a step."""
    config = home.config(total_steps=2000, checkpoint={"auto_save": False})
    id = told(home, "run", home.write("long.json", config), "--detach")["id"]
    until = time.monotonic() + PLAYING_SECONDS
    while True:
        run = next(run for run in told(home, "runs") if run["id"] == id)
        if run["state"] == "running" and run["step"] > 0:
            return run
        assert time.monotonic() < until, run
        time.sleep(0.2)


def test_a_run_is_profiled_while_it_plays(served: Home) -> None:
    run = playing(served)
    traces = Path(run["directory"]) / "traces"
    calls = told(served, "profile", run["id"])
    assert [call["call"] for call in calls] == ["actor.logprobs", "actor.update"]
    assert len({call["step"] for call in calls}) == 1
    for call in calls:
        (rank,) = call["ranks"]
        assert (call["replica"], rank["rank"], rank["fault"]) == ("actor-0", 0, "")
        assert rank["path"] == str(traces / f"step-{call['step']}-{call['call']}-rank-0.json.gz")
        assert (0 < rank["compute_share"] <= 1, rank["communication_share"]) == (True, 0)
        with gzip.open(rank["path"], "rt") as file:
            names = {each["name"] for each in json.load(file)["traceEvents"]}
        assert {top["name"] for top in rank["top"]} <= names

    table = served.sextet("profile", run["id"], "--role", "reference")
    assert table.returncode == 0, table.stderr
    assert "reference.logprobs" in table.stdout
    assert f"traces in {traces}" in table.stderr

    calls = told(served, "profile", run["id"], "--role", "critic", "--steps", "2")
    steps = [call["step"] for call in calls if call["call"] == "critic.update"]
    assert steps == [steps[0], steps[0] + 1]

    for arguments, words in (
        ((run["id"], "--role", "rollout"), "role: 'rollout' has no profiler; actor, critic, reference have one"),
        ((run["id"], "--steps", "11"), "steps: 11 is not between 1 and 10"),
        (("none",), "there is no run 'none'"),
    ):
        refused = served.sextet("profile", *arguments)
        assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    told(served, "cancel", run["id"])
    refused = served.sextet("profile", run["id"])
    assert refused.returncode == 2
    assert f"run '{run['id']}' is cancelled: only a running one can be profiled" in refused.stderr
    lines = served.sextet("watch", run["id"], "--json").stdout.splitlines()
    events = [event for event in map(json.loads, lines) if event.get("kind") == "profile"]
    assert [event["message"].partition(" ")[0] for event in events[:2]] == ["actor.logprobs", "actor.update"]
    assert events[0]["metrics"]["ranks"] == 1
