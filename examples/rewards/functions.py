"""Reward functions in the two signatures that Sextet knows. Name one in a run's config:

reward:
  backend: function
  function: examples/rewards/functions.py:compute_score
"""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """verl's signature: 1.0 when the last line is the answer; the other numbers are metrics."""
    lines = solution_str.strip().splitlines() or [""]
    exact = float(lines[-1].strip() == ground_truth.strip())
    return {"score": exact, "exact": exact, "lines": float(len(lines))}


async def answer_is_contained(
    prompts: list[Any], completions: list[Any], ground_truth: list[str], weight: float = 1.0, **columns: list[Any]
) -> list[float | None]:
    """TRL's signature, for a batch at once; `weight` comes from reward.kwargs. None: this one can't be graded."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    pairs = zip(texts, ground_truth, strict=True)
    return [weight * float(truth in text) if truth else None for text, truth in pairs]
