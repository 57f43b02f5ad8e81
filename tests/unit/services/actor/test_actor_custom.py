"""Estimators and losses of the user's own."""

from pathlib import Path

import pytest

from services.actor.custom import load_custom
from shared.algo import ADVANTAGES, GROUPED_ADVANTAGES, POLICY_LOSSES
from tests.fakes.training import make_config
from tests.unit.services.actor.test_actor_torch import actor_for, step

EXAMPLE = Path(__file__).parents[4] / "examples" / "custom_algorithm.py"
SOURCE = """
from shared.algo import register_advantage
@register_advantage("mine{number}", grouped=True, limit=1.0)
def mine(inputs, options):
    return {number}
"""


async def test_the_example_trains(tiny_llama: Path) -> None:
    config = make_config(
        tiny_llama, f"algorithm.advantage={EXAMPLE}:median_centred", f"algorithm.policy_loss={EXAMPLE}:squared_ratio",
        "algorithm.options={limit: 0.5}", "actor.loss.options={beta: 0.2}", "rollout.n=4",
    )  # fmt: skip
    for _ in range(2):
        actor = await actor_for(config)
        metrics = await step(actor, 1)
        assert metrics["grad_norm"] > 0


def test_a_changed_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    for number in (1, 2):
        path.write_text(SOURCE.format(number=number))
        config = load_custom(
            make_config(tmp_path, f"algorithm.advantage={path}:mine{number}", "algorithm.policy_loss=ppo")
        )
        assert config.algorithm.advantage == f"mine{number}"
        assert config.algorithm.policy_loss == "ppo"
        assert "mine2" in ADVANTAGES or number == 1
    assert "mine1" not in ADVANTAGES
    assert "mine1" not in GROUPED_ADVANTAGES
    assert "ppo" in POLICY_LOSSES


@pytest.mark.parametrize(
    ("source", "spec", "message"),
    [
        (None, "{path}:mine1", "there is no file"),
        ("1/0", "{path}:mine1", "ZeroDivisionError"),
        (None, "no_such_module:mine1", "No module named 'no_such_module'"),
        (
            'from shared.algo import *\n@register_advantage("gae")\ndef gae(i, o): ...',
            "{path}:gae",
            "already registered",
        ),
    ],
)
def test_what_cannot_be_imported_is_named(tmp_path: Path, source: str | None, spec: str, message: str) -> None:
    path = tmp_path / "mine.py"
    if source:
        path.write_text(source)
    with pytest.raises(ValueError, match=rf"^algorithm\.advantage=.*{message}"):
        load_custom(make_config(tmp_path, f"algorithm.advantage={spec.format(path=path)}"))
