"""Between batches and graders: rows to items, grades to columns and numbers. Pure functions."""

import math
from collections import Counter
from collections.abc import Sequence

from services.reward.backend import Grade, Item
from shared.batch import columns
from shared.batch.block import Block, Ragged

INPUTS = (
    columns.DATA_SOURCE,
    columns.PROMPT_JSON,
    columns.RESPONSE,
    columns.GROUND_TRUTH,
    columns.EXTRA_INFO,
)
MAX_SOURCES = 8
MAX_PARTS = 16


def items_of(block: Block) -> list[Item]:
    """One item per row of a block with the columns INPUTS."""
    texts = zip(*(block[name].texts() for name in INPUTS), strict=True)
    return [Item(key.uid, key.sample, *row) for key, row in zip(block.rows, texts, strict=True)]


def block_of(rows: Sequence[columns.RowKey], grades: Sequence[Grade]) -> Block:
    """Columns score (NaN where invalid, so that a use by mistake is seen), valid, and score/NAME (NaN where absent)."""
    made = {
        columns.SCORE: Ragged.from_scalars([grade.score for grade in grades], "float32"),
        columns.VALID: Ragged.from_scalars([grade.valid for grade in grades], "uint8"),
    }
    for name in part_names(grades):
        values = [grade.parts.get(name, math.nan) for grade in grades]
        made[columns.SCORE_PREFIX + name] = Ragged.from_scalars(values, "float32")
    return Block(tuple(rows), made)


def metrics_of(items: Sequence[Item], grades: Sequence[Grade], seconds: float) -> dict[str, float]:
    """Numbers over the valid grades, except `invalid`, `invalid_share` and `KIND_errors`.

    `std` is the population's; `source/NAME` is the mean of a data_source, for the first eight of them;
    `score/NAME` is the mean of a part.
    """
    valid = [grade.score for grade in grades if grade.valid]
    invalid = len(grades) - len(valid)
    numbers = {"count": float(len(valid)), "invalid": float(invalid), "seconds": seconds}
    if grades:
        numbers["invalid_share"] = invalid / len(grades)
    if valid:
        mean = _mean(valid)
        numbers |= {"mean": mean, "min": min(valid), "max": max(valid)}
        numbers["std"] = math.sqrt(_mean([(score - mean) ** 2 for score in valid]))
    for kind, count in Counter(grade.kind for grade in grades if not grade.valid).items():
        numbers[f"{kind}_errors"] = float(count)
    for name in part_names(grades):
        numbers[f"score/{name}"] = _mean([grade.parts[name] for grade in grades if name in grade.parts])
    return numbers | _source_means(items, grades)


def part_names(grades: Sequence[Grade]) -> list[str]:
    """Names of the parts, first seen first, at most sixteen."""
    return list(dict.fromkeys(name for grade in grades for name in grade.parts))[:MAX_PARTS]


def _source_means(items: Sequence[Item], grades: Sequence[Grade]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for item, grade in zip(items, grades, strict=True):
        if grade.valid and (item.data_source in scores or len(scores) < MAX_SOURCES):
            scores.setdefault(item.data_source, []).append(grade.score)
    return {f"source/{name[:64]}": _mean(values) for name, values in scores.items()}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
