"""The example of an agent: its configuration is one, and its game pays as it says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.config_loading import load_config
from shared.userfile import load_file

ROOT = Path(__file__).parents[3]
agent = load_file(ROOT / "examples/agent/second_try.py", "example_")


class FakeClient:
    """Says these answers; remembers what it was asked."""

    def __init__(self, *answers: str) -> None:
        self._answers, self.asked = list(answers), []
        self.chat = SimpleNamespace(completions=self)

    def create(self, model: str, messages: list[dict[str, Any]]) -> Any:
        self.asked.append(list(messages))
        message = SimpleNamespace(content=self._answers.pop(0))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


@pytest.mark.parametrize(("answers", "worth"), [(("3 2 1",), 1.0), (("1 2 3", "3 2 1 "), 0.5), (("", "3 2"), 0.0)])
def test_right_at_once_is_worth_more_than_right_at_last(answers: tuple[str, ...], worth: float) -> None:
    client, prompt = FakeClient(*answers), [{"role": "user", "content": "Reverse 1 2 3"}]
    assert agent.play(client, {"prompt": prompt, "ground_truth": "3 2 1"}) == worth
    assert len(client.asked) == len(answers)
    assert client.asked[-1][:1] == prompt
    assert [message["role"] for message in client.asked[-1]] == ["user", "assistant", "user"][: 2 * len(answers) - 1]


def test_its_configuration_is_one() -> None:
    config = load_config(ROOT / "examples/agent/second_try.yaml")
    assert (config.rollout.agents, config.reward.backend) == (True, "agents")
