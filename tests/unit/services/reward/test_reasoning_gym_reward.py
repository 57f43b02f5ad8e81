"""The reasoning-gym example: right answers to real tasks, however they are put; nothing evaluated."""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest

reasoning_gym = pytest.importorskip("reasoning_gym")

PATH = Path(__file__).parents[4] / "examples/rewards/reasoning_gym_reward.py"
spec = importlib.util.spec_from_file_location("reasoning_gym_reward", PATH)
assert spec is not None
assert spec.loader is not None
grader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(grader)

CHAIN_SUM = {"source_dataset": "chain_sum"}


def score(response: str, truth: str, extra: dict | None = None, **kwargs: float) -> float:
    return grader.compute_score("reasoning_gym", response, truth, CHAIN_SUM if extra is None else extra, **kwargs)[
        "score"
    ]


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("-4", "-4"), ("4 - 1 - 7 = -4", "-4"), ("The answer is **1,234**.", "1234"), ("3-4+5 is 4.", "4"),
        ("<answer> 12 </answer> not 13", "12"), ("<answer>1</answer><ANSWER>= 12</ANSWER>", "12"), ("12.0", "12"),
        ("\u22125", "-5"), ("$12", "12"), ("x=7\n\n", "7"), ("0012", "12"), ("1\n2\n12kg", "12"),
    ],
)  # fmt: skip
def test_right_answers(response, truth):
    assert score(response, truth) == 1.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [("123", "12"), ("", "12"), ("12 or 13", "12"), ("twelve", "12"), ("3-4", "-4"), ("x12", "12"), ("1e1", "10"),
     ("9" * 5000, "12"), ("Infinity", "12"), ("NaN", "12"), ("12." + "0" * 500 + "1", "12"),
     ("<answer></answer> 12", "12")],
)  # fmt: skip
def test_wrong_answers(response, truth):
    assert score(response, truth) == 0.0


def test_shaping_grows_towards_the_answer_and_stays_below_it():
    credits = [score(str(number), "12", shaping=0.2) for number in (1000, 20, 13, 12)]
    assert credits == sorted(set(credits))
    assert credits[-1] == 1.0
    assert all(0 < credit < 0.2 for credit in credits[:-1])
    assert score("no number", "12", shaping=0.2) == 0.0


@pytest.mark.parametrize(
    "task", ["chain_sum", "gsm_symbolic", "basic_arithmetic", "leg_counting", "word_sorting", "gcd"]
)
def test_real_entries_by_every_way_to_name_the_task(task):
    for entry in reasoning_gym.create_dataset(task, size=5, seed=3):
        response = f"Let me think: 17.\nSo it is\n{entry['answer']}"
        for source, extra in [
            ("", {"metadata": entry["metadata"]}),
            ("", {"source_dataset": task, "metadata": entry["metadata"]}),
            (f"reasoning_gym/{task}", {"metadata": {**entry["metadata"], "source_dataset": ""}}),
        ]:
            graded = grader.compute_score(source, response, entry["answer"], extra)
            assert graded == {"score": 1.0, "exact": 1.0, "answered": 1.0}, (entry["answer"], source)
        assert (
            grader.compute_score("", "nonsense 99991", entry["answer"], {"metadata": entry["metadata"]})["exact"] == 0
        )


def test_tasks_whose_scorers_evaluate_the_answer_are_refused(tmp_path):
    for task in grader.EVALUATE_ANSWERS:
        with pytest.raises(ValueError, match="evaluates the response as Python"):
            score("1", "1", {"source_dataset": task})


def test_no_other_scorer_evaluates_answers():
    """Every task whose scorer reaches eval, exec or sympy's parser is refused or was read and found safe."""
    from reasoning_gym.factory import DATASETS

    # These evaluate the task's own data: number_sorting its ground truth, bitwise_arithmetic its problem.
    read = {"number_sorting", "bitwise_arithmetic"}
    found = {name for name, (dataset, _) in DATASETS.items() if _evaluates(dataset)}
    assert found - read == grader.EVALUATE_ANSWERS


def _evaluates(dataset: type) -> bool:
    """score_answer, or a function of its module that it calls, by however many steps, calls an evaluator."""
    module = sys.modules[dataset.__module__]
    trees = {
        node.name: node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.FunctionDef) and node.name not in ("__getitem__", "__init__")
    }
    # propositional_logic has a parser of its own under that name.
    evaluators = {"eval", "exec", "parse_expr", "sympify"} - set(trees)
    seen, waiting = set(), ["score_answer"]
    while waiting:
        name = waiting.pop()
        if name in evaluators:
            return True
        if name in trees and name not in seen:
            seen.add(name)
            calls = (node.func for node in ast.walk(trees[name]) if isinstance(node, ast.Call))
            waiting += [getattr(call, "id", getattr(call, "attr", "")) for call in calls]
    return False
