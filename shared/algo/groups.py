"""Statistics over rows that share a prompt. Rows outside `part_B` count nowhere; results are float64.

float64, because the rounding error of a float32 mean is divided by eps where all scores of a group are equal.
"""

import torch
from torch import Tensor

from .masking import blank


def group_sum(x_B: Tensor, part_B: Tensor, groups_B: Tensor) -> Tensor:
    """[B] sum of `x_B` over the rows of each row's group that take part."""
    kept_B = blank(x_B.double(), part_B)
    _, index_B = torch.unique(groups_B, return_inverse=True)
    return kept_B.new_zeros(len(kept_B)).index_add(0, index_B, kept_B)[index_B]


def group_count(part_B: Tensor, groups_B: Tensor) -> Tensor:
    """[B] int64 number of rows of each row's group that take part."""
    return group_sum(part_B, part_B, groups_B).to(torch.int64)


def group_mean(x_B: Tensor, part_B: Tensor, groups_B: Tensor) -> Tensor:
    """[B] mean over the group; 0 for a group in which nobody takes part."""
    return group_sum(x_B, part_B, groups_B) / group_count(part_B, groups_B).clamp(min=1)


def group_std(x_B: Tensor, part_B: Tensor, groups_B: Tensor) -> Tensor:
    """[B] sample standard deviation (n - 1) over the group; 0 for fewer than two rows."""
    deviations_B = blank(x_B - group_mean(x_B, part_B, groups_B), part_B)
    count_B = group_count(part_B, groups_B)
    return (group_sum(deviations_B.square(), part_B, groups_B) / (count_B - 1).clamp(min=1)).sqrt()


def one_of_each(part_B: Tensor, samples_B: Tensor) -> Tensor:
    """bool [B]: of the rows of one sample, the first that takes part."""
    _, index_B = torch.unique(samples_B, return_inverse=True)
    places_B = torch.arange(len(part_B), device=part_B.device)
    nowhere_B = torch.full_like(places_B, len(part_B))
    first_G = nowhere_B.scatter_reduce(0, index_B, torch.where(part_B, places_B, nowhere_B), "amin")
    return first_G[index_B] == places_B


def groups_with_signal(x_B: Tensor, part_B: Tensor, groups_B: Tensor) -> Tensor:
    """bool [B]: rows that take part in a group whose values are not all equal (DAPO's dynamic sampling keeps them)."""
    _, index_B = torch.unique(groups_B, return_inverse=True)
    high_B, low_B = blank(x_B.double(), part_B, -torch.inf), blank(x_B.double(), part_B, torch.inf)
    high_G = torch.full_like(high_B, -torch.inf).scatter_reduce(0, index_B, high_B, "amax")
    low_G = torch.full_like(low_B, torch.inf).scatter_reduce(0, index_B, low_B, "amin")
    return part_B & (high_G > low_G)[index_B]
