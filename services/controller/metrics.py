"""Numbers of a step: parts of one call into one, calls into the step's line."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.controller.calls import Result
from shared.batch.refs import merge, row_keys

_SUMS = ("tokens", "count", "rows", "samples", "truncated", "invalid", "errors", "bytes")


def combine(responses: Sequence[Any]) -> dict[str, float]:
    """Metrics of a call whose rows were split into one.

    Counts and rates add up, maxima, minima and seconds take the extreme, everything else is the mean over rows.
    """
    return _over_parts((response.metrics, len(response.block.rows)) for response in responses)


def join_parts(results: Sequence[Result]) -> Result:
    """The parts of one call as the whole, from the first one's beginning to the last one's end."""
    if len(results) == 1:
        return results[0]
    refs = [result.ref for result in results if result.ref]
    metrics = _over_parts((part.metrics, len(row_keys(part.ref)) if part.ref else 0) for part in results)
    began = min(result.began for result in results)
    seconds = max(result.began + result.seconds for result in results) - began
    if seconds and {"tokens_per_second", "response_tokens"} <= metrics.keys():
        # Parts overlap: their speeds do not add up.
        metrics["tokens_per_second"] = metrics["response_tokens"] / seconds
    scores = tuple(score for result in results for score in result.scores)
    return Result(results[0].call, merge(*refs) if refs else None, metrics, scores, began, seconds)


def _over_parts(parts: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    values: dict[str, list[tuple[float, int]]] = {}
    for metrics, rows in parts:
        for name, value in metrics.items():
            values.setdefault(name, []).append((value, max(1, rows)))
    return {name: _combined(name, numbers) for name, numbers in values.items()}


def _combined(name: str, parts: list[tuple[float, int]]) -> float:
    numbers = [value for value, _ in parts]
    last = name.rpartition("_")[2].rpartition("/")[2]
    if last in _SUMS or name.endswith("_per_second"):
        return sum(numbers)
    if last in ("max", "seconds"):
        return max(numbers)
    if last == "min":
        return min(numbers)
    return sum(value * rows for value, rows in parts) / sum(rows for _, rows in parts)


def flatten(results: Iterable[Result]) -> dict[str, float]:
    """`call/name` for every number of every call."""
    return {f"{result.call}/{name}": value for result in results for name, value in result.metrics.items()}
