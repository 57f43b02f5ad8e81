"""The agent's own word as the grade: taken as it is, or not valid."""

import json
from dataclasses import replace

import pytest

from services.reward.backends import make_backend
from shared.config_loading import load_config
from tests.fakes.reward import item


@pytest.mark.parametrize(
    ("extra_info", "score", "kind"),
    [
        ({"agent": {"reward": 0.1, "turns": 2}, "k": 1}, 0.1, ""),
        ({"agent": {"reward": 0, "turns": 1}}, 0.0, ""),
        ({"agent": {"reward": None, "turns": 1}}, None, "ungraded"),
        ({"agent": {"reward": "1"}}, None, "score"),
        ({"agent": 1.0}, None, "ungraded"),
        ({}, None, "ungraded"),
        ([1], None, "ungraded"),
    ],
)
async def test_the_reward_that_stands_in_extra_info(extra_info: object, score: float | None, kind: str) -> None:
    tree = {"model": {"path": "none"}, "data": {"path": "none"}, "total_steps": 1, "reward": {"backend": "agents"}}
    config = load_config({**tree, "rollout": {"agents": True, "context": 64}})
    backend = make_backend(config, 1 << 30)
    await backend.open(config)
    [grade] = await backend.score("r", [replace(item("a", "b"), extra_info_json=json.dumps(extra_info))])
    assert (grade.kind, grade.valid) == (kind, not kind)
    if score is not None:
        assert grade.score == score
    await backend.close()
