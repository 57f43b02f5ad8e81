"""The example reward functions say what their comments say."""

import pytest

from services.reward.backends.function import FunctionBackend
from tests.fakes.reward import GRADERS, item, items, reward_config

EXAMPLES = GRADERS.parents[2] / "examples/rewards/functions.py"


async def graded(name, asked, **reward):
    backend = FunctionBackend(0)
    await backend.open(reward_config(function=f"{EXAMPLES}:{name}", **reward))
    try:
        return await backend.score("r", asked)
    finally:
        await backend.close()


async def test_compute_score_wants_the_answer_in_the_last_line():
    right, wrong, empty = await graded("compute_score", items("so\n a ", "a\nb", ""))
    assert [grade.score for grade in (right, wrong, empty)] == [1.0, 0.0, 0.0]
    assert dict(right.parts) == {"exact": 1.0, "lines": 2.0}


@pytest.mark.parametrize("prompt", ['"text"', '[{"role": "user", "content": "chat"}]'])
async def test_answer_is_contained_skips_what_has_no_answer(prompt):
    asked = [item(text, truth, prompt=prompt) for text, truth in [("xay", "a"), ("b", "a"), ("b", "")]]
    right, wrong, none = await graded("answer_is_contained", asked, kwargs={"weight": 0.5})
    assert (right.score, wrong.score, none.valid) == (0.5, 0.0, False)
