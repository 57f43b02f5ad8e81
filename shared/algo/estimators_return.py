"""Estimators built on returns per token: GAE, REINFORCE++, ReMax, optimal token baseline."""

import torch
from torch import Tensor

from .advantages import (
    AdvantageInputs,
    AdvantageOptions,
    Advantages,
    discounted_returns,
    finish,
    maybe_whiten,
    register_advantage,
)
from .estimators_group import group_sizes
from .masking import blank


@register_advantage("gae")
@torch.no_grad()
def gae(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """Generalised advantage estimation (arXiv:1506.02438) over sampled tokens only.

    delta_t = r_t + gamma V(next) - V_t and A_t = delta_t + gamma lam A(next), where next is the next SAMPLED token:
    tool tokens in between are the environment's answer, not steps. After the last one V and A are 0. Returns are
    A + V before whitening. As verl and TRL.
    """
    if inputs.values_BT is None:
        raise ValueError("advantage 'gae' needs values: run the critic, or choose a critic-free estimator")
    active_BT = inputs.active_BT
    rewards_BT, values_BT = blank(inputs.token_rewards_BT, active_BT), blank(inputs.values_BT, active_BT)
    advantages_BT = torch.zeros_like(rewards_BT)
    next_value_B = next_advantage_B = rewards_BT.new_zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        delta_B = rewards_BT[:, t] + options.gamma * next_value_B - values_BT[:, t]
        advantage_B = delta_B + options.gamma * options.lam * next_advantage_B
        next_value_B = torch.where(active_BT[:, t], values_BT[:, t], next_value_B)
        next_advantage_B = torch.where(active_BT[:, t], advantage_B, next_advantage_B)
        advantages_BT[:, t] = next_advantage_B
    advantages_BT = blank(advantages_BT, active_BT)
    return finish(maybe_whiten(advantages_BT, inputs, options), inputs, advantages_BT + values_BT)


@register_advantage("reinforce_plus_plus")
@torch.no_grad()
def reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """Discounted return of each token, whitened over the batch (arXiv:2501.03262).

    The return passes over tool tokens undiscounted (verl resets it there, which loses the reward of earlier turns).
    """
    returns_BT = discounted_returns(inputs.token_rewards_BT, inputs.active_BT, options.gamma)
    return finish(maybe_whiten(returns_BT, inputs, options), inputs)


@register_advantage("remax")
@torch.no_grad()
def remax(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """Return of each token minus the score of the greedy answer to the same prompt (arXiv:2310.10505).

    The greedy rows themselves are not in the batch. A prompt whose greedy answer could not be graded has no baseline:
    its rows must be invalid.
    """
    if inputs.baseline_scores_B is None:
        raise ValueError("advantage 'remax' needs the score of a greedy answer per prompt: use flow 'remax'")
    inputs.require_finite("baseline_scores_B", inputs.baseline_scores_B)
    returns_BT = discounted_returns(inputs.token_rewards_BT, inputs.active_BT, 1.0)
    baseline_B1 = blank(inputs.baseline_scores_B, inputs.taking_part_B)[:, None]
    return finish(blank(returns_BT - baseline_B1, inputs.active_BT), inputs)


@register_advantage("optimal_token_baseline", grouped=True, zero_tail=1.0)
@torch.no_grad()
def optimal_token_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """G_t minus a baseline for each step t of the group, weighted by the path's gradient energy so far.

    b_t = sum_i W_it G_it / sum_i W_it over the group's rows that reach step t, with W_it = sum_{j<=t} (1 - 2 pi_ij +
    sum_v pi_v^2), the squared norm of the score function with respect to the logits. Steps count sampled tokens, so
    tool tokens don't shift them (verl: tir_optimal_token_baseline). `zero_tail` (verl's handle_zero_tail): where only
    one row of the group is left, its baseline is 0 instead of its own return, which would make its advantage 0.
    A sample's rows that reach the same step count there as one, by their mean W and W G.
    """
    if inputs.old_logprobs_BT is None or inputs.sum_pi_squared_BT is None:
        raise ValueError("advantage 'optimal_token_baseline' needs old log-probs and sum_pi_squared")
    active_BT, sizes_B = inputs.active_BT, group_sizes(inputs)
    returns_BT = discounted_returns(inputs.token_rewards_BT, active_BT, 1.0)
    energy_BT = 1 - 2 * blank(inputs.old_logprobs_BT, active_BT).exp() + blank(inputs.sum_pi_squared_BT, active_BT)
    paths_BT = blank(energy_BT, active_BT).cumsum(1)
    _, index_B = torch.unique(inputs.groups_B, return_inverse=True)
    cells_BT = _cells(active_BT, index_B)
    shares_BT = _shares(active_BT, inputs.samples_B).to(paths_BT.dtype)
    weights_BT = paths_BT * shares_BT
    weighted_BT = _sum_cells(weights_BT * returns_BT, active_BT, cells_BT)
    baseline_BT = weighted_BT / _sum_cells(weights_BT, active_BT, cells_BT).clamp(min=1e-8)
    if options.extra["zero_tail"]:
        # Shares add up to a whole number of samples, nearly.
        baseline_BT = blank(baseline_BT, _sum_cells(shares_BT, active_BT, cells_BT) > 1.5)
    advantages_BT = blank(returns_BT.double() - baseline_BT, active_BT & (sizes_B > 1)[:, None])
    return finish(advantages_BT.to(returns_BT.dtype), inputs)


def _cells(active_BT: Tensor, index_B: Tensor) -> Tensor:
    """int64 [B, T]: one number for each (group, step); step is the ordinal of a sampled token in its row."""
    steps_BT = (active_BT.cumsum(1) - 1).clamp(min=0)
    return index_B[:, None] * active_BT.shape[1] + steps_BT


def _shares(active_BT: Tensor, samples_B: Tensor | None) -> Tensor:
    """float64 [B, T] 1 / the number of rows of the row's sample that reach the step."""
    ones_BT = active_BT.double()
    if samples_B is None:
        return ones_BT
    _, index_B = torch.unique(samples_B, return_inverse=True)
    return ones_BT / _sum_cells(ones_BT, active_BT, _cells(active_BT, index_B)).clamp(min=1)


def _sum_cells(x_BT: Tensor, active_BT: Tensor, cells_BT: Tensor) -> Tensor:
    """float64 [B, T]: sum of `x_BT` over the active positions that share a cell."""
    sums_N = x_BT.new_zeros(x_BT.numel(), dtype=torch.float64)
    kept_BT = blank(x_BT.double(), active_BT)
    return sums_N.index_add(0, cells_BT.flatten(), kept_BT.flatten())[cells_BT]
