"""A slow rollout gets fewer rows, and the run ends as if it had not been there."""

from typing import Any

from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller
from tests.unit.services.controller.test_failures import outcome, undisturbed

__all__ = ["undisturbed"]


async def test_a_slow_rollout_gets_less(fakes: FakeSextet, controller: Controller, undisturbed: Any) -> None:
    await fakes.start(*ALL, "rollout-1")
    fakes["rollout-0"].token_seconds, fakes["rollout-1"].token_seconds = 0.001, 0.009
    assert await outcome(controller, fakes) == undisturbed
    by_step = [
        {name: sum(key.uid.startswith(f"{step}:") for key in fakes[name].rows["rollout.generate"]) for name in
         ("rollout-0", "rollout-1")} for step in (1, 2, 3)
    ]  # fmt: skip
    assert by_step[0] == {"rollout-0": 4, "rollout-1": 4}
    # Nine times as slow: of four prompts with two samples each it has none, or one sample's worth.
    for counts in by_step[1:]:
        assert counts["rollout-0"] + counts["rollout-1"] == 8
        assert counts["rollout-1"] <= 2
