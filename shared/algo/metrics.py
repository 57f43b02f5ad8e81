"""Metrics of a part of a mini-batch that combine exactly over all its parts.

A name ends in `_sum` (adds up; reported as a mean over the mini-batch's tokens), `_max` or `_min`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .aggregation import Totals


def combine_metrics(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of all parts together. A part without loss-carrying tokens has 0 sums, -inf maxima, inf minima."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _combine(name, [part[name] for part in parts if name in part]) for name in names}


def finish_metrics(combined: dict[str, Tensor], totals: Totals) -> dict[str, float]:
    """Means over the mini-batch's tokens (the suffix `_sum` goes), maxima and minima as they are; {} without tokens."""
    if totals.tokens == 0:
        return {}
    return {
        name.removesuffix("_sum"): float(value) / totals.tokens if name.endswith("_sum") else float(value)
        for name, value in combined.items()
    }


def _combine(name: str, values: list[Tensor]) -> Tensor:
    stacked = torch.stack(values)
    if name.endswith("_sum"):
        return stacked.sum(0)
    if name.endswith("_max"):
        return stacked.amax(0)
    if name.endswith("_min"):
        return stacked.amin(0)
    raise ValueError(f"metric {name!r} must end in _sum, _max or _min")
