"""The demo's grader: an ordinary Python function with verl's signature."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 for the digits in reverse order and nothing else, 0.0 otherwise."""
    return float(solution_str.split() == ground_truth.split())
