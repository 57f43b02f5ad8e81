"""The chain_sum example: prompts in verl's columns, answers that their grader accepts, a run that is valid."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

from examples.make_chain_sum import problems
from examples.rewards.reasoning_gym_reward import compute_score
from shared.config_loading import load_config
from shared.data.datasets import load_rows


def test_the_file_is_a_dataset_whose_answers_the_grader_accepts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "train.parquet"
    subprocess.run(
        [sys.executable, "examples/make_chain_sum.py", str(path), "--rows", "20", "--terms", "3", "--digits", "2"],
        check=True,
        timeout=60,
    )
    rows = load_rows(str(path))
    assert len(rows) == 20
    for row in rows:
        extra = json.loads(row.extra_info)
        expression = extra["metadata"]["expression"]
        # The sum once more: terms and signs alternate.
        first, *others = expression.split()
        total = int(first)
        for sign, term in zip(others[::2], others[1::2], strict=True):
            total += int(term) if sign == "+" else -int(term)
        assert row.ground_truth == str(total)
        right, wrong = (
            compute_score(row.data_source, f"The answer is {n}.", row.ground_truth, extra, shaping=0.2)["score"]
            for n in (total, total + 1)
        )
        assert right == 1.0
        assert 0 < wrong < 0.2


def test_a_seed_gives_the_same_problems_again_and_another_seed_others() -> None:
    first, again, other = (list(problems(8, seed, 2, 1)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("arguments", [["x.parquet", "--terms", "1"], ["x.parquet", "--rows", "0"], ["x.csv"]])
def test_bad_arguments_write_nothing(arguments: list[str], tmp_path: Path) -> None:
    script = Path("examples/make_chain_sum.py").absolute()
    done = subprocess.run(
        [sys.executable, script, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_run_is_valid_and_long_enough() -> None:
    config = load_config("examples/smollm2_chain_sum.yaml")
    assert config.total_steps is not None
    assert config.total_steps >= 20
    assert config.algorithm.kl.placement == "reward"
