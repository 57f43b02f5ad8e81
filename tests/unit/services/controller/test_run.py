"""A run from its beginning to its end, nothing going wrong."""

import json
from pathlib import Path

from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller


async def test_ppo_run_applies_every_step_once_and_leaves_its_files(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    record = await controller.create("r", total_steps=5)
    await controller.over("r")
    assert (record.state, record.reason, record.step) == ("done", "", 5)
    assert fakes["actor-0"].done["update"] == fakes["critic-0"].done["update"] == 5
    assert set(fakes["actor-0"].rows["update"].values()) == {1}
    assert fakes["actor-0"].columns_seen == [
        "old_logprobs", "ref_logprobs", "response_ids", "score", "values", "versions"
    ]  # fmt: skip
    directory = Path(record.directory)
    assert (directory / "model" / "model.json").exists()
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step_4", "step_5"]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] == 5
    assert summary["calls"]["actor.update"]["steps"] == 5
    assert summary["metrics"]["actor.update/loss"]["mean"] == 0.25


async def test_events_tell_the_story_in_order(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    await controller.create("r", total_steps=2)
    events = await controller.events("r")
    assert controller.runs._records.known["r"].total_steps == 2
    assert [kind for kind, _, _ in events if kind != "call"] == [
        "state",
        "state",
        "step",
        "step",
        "checkpoint",
        "state",
    ]
    assert ("step", 2, "step 2 of 2") in events
    assert events[-1] == ("state", 2, "done")
    assert {message for kind, _, message in events if kind == "call"} >= {"rollout.generate", "sync_weights"}
