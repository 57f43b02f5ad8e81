"""Grades answers to reasoning-gym tasks (https://github.com/open-thought/reasoning-gym) by the task's own scorer.

reward:
  backend: function
  function: examples/rewards/reasoning_gym_reward.py:compute_score
  kwargs: {shaping: 0.2}   # optional

The dataset's rows name the task in `extra_info.source_dataset` (or `extra_info.metadata.source_dataset`, or as the
last part of `data_source`: "reasoning_gym/chain_sum"); `extra_info.metadata` is the entry's metadata, where a scorer
needs it.
"""

import functools
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import reasoning_gym

# Their scorers run eval() or sympy's parse_expr(), which is eval(), on the answer: a response would be executed.
EVALUATE_ANSWERS = {
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
}  # fmt: skip
MAX_ANSWER = 4096
MAX_DIGITS = 64
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
# A minus counts only where it cannot be an operator: "3-4" ends with 4, "= -4" with -4.
NUMBER = re.compile(r"(?<![\w.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], shaping: float = 0.0
) -> dict[str, float]:
    """1.0 for a right answer, else 0.0 or, with shaping, less than `shaping` for a wrong number.

    The scorers' own partial credit is not used: chain_sum's, for one, gives 0.67 for 123 where 12 is right.

    Args:
        shaping: in [0, 1): a wrong number earns shaping / (1 + its distance from the right one). A small model is
            right too rarely at first to learn from right or wrong alone; and since every right answer still beats
            every wrong one, what is best does not change.
    """
    task = task_name(data_source, extra_info)
    answer = extract_answer(solution_str, numeric=decimal(ground_truth) is not None)
    entry = {"question": "", "answer": ground_truth, "metadata": extra_info.get("metadata", extra_info)}
    exact = float(answer is not None and scorer(task)(answer, entry) >= 1.0)
    credit = exact or shaping * closeness(answer, ground_truth)
    return {"score": credit, "exact": exact, "answered": float(answer is not None)}


def extract_answer(response: str, *, numeric: bool) -> str | None:
    """What stands in the last <answer> tags, else at the end: the last number, or for other tasks the last line."""
    tagged = TAGGED.findall(response[-MAX_ANSWER:])
    text = (tagged[-1] if tagged else response[-MAX_ANSWER:]).replace("\u2212", "-").strip()
    if not numeric:
        return (text if tagged else text.rpartition("\n")[2].strip()) or None
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers and len(numbers[-1]) <= MAX_DIGITS else None


def task_name(data_source: str, extra_info: dict[str, Any]) -> str:
    metadata = extra_info.get("metadata")
    named = extra_info.get("source_dataset") or (isinstance(metadata, dict) and metadata.get("source_dataset"))
    return str(named or data_source.rpartition("/")[2])


@functools.cache
def scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    """The task's `score_answer`."""
    if task in EVALUATE_ANSWERS:
        raise ValueError(f"reasoning-gym's scorer of {task!r} evaluates the response as Python: use another task")
    return reasoning_gym.get_score_answer_fn(task)  # pyright: ignore[reportReturnType] - its annotation has no arguments


def closeness(answer: str | None, truth: str) -> float:
    """1 / (1 + distance) of two numbers; 0 where one is none."""
    given, wanted = decimal(answer or ""), decimal(truth)
    return 0.0 if given is None or wanted is None else float(1 / (1 + abs(given - wanted)))


def decimal(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().replace(",", "")) if len(text) <= MAX_DIGITS else None
    except InvalidOperation:
        return None
    return number if number is not None and number.is_finite() else None
