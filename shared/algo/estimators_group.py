"""Estimators that compare the answers to one prompt; each gives a row one advantage for all its tokens.

What is compared are samples: one of several rows counts once, and all of its rows get its advantage. A sample
left alone in its group (the others failed) has nothing to be compared with and gets 0; verl keeps its raw score.
"""

from math import comb

import torch
from torch import Tensor

from .advantages import (
    AdvantageInputs,
    AdvantageOptions,
    Advantages,
    finish,
    maybe_whiten,
    register_advantage,
    spread,
)
from .groups import group_count, group_mean, group_std, group_sum, groups_with_signal
from .masking import blank, masked_mean, masked_var


@register_advantage("grpo", grouped=True, batch_std=0.0)
@torch.no_grad()
def grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """(R - mean of the group) / (std of the group + eps) (arXiv:2402.03300).

    The standard deviation is the sample one (n - 1), as in verl and TRL. `normalize_std=False` gives Dr. GRPO's;
    `batch_std=1` divides by the standard deviation of the whole batch (TRL: scale_rewards="batch").
    """
    centred_B = centred(inputs.outcomes_B, inputs)
    if options.extra["batch_std"]:
        centred_B = centred_B / (masked_var(inputs.outcomes_B.double(), inputs.counted_B).sqrt() + options.eps)
    elif options.normalize_std:
        centred_B = centred_B / _scale(inputs.outcomes_B, inputs, options)
    return finish(spread(centred_B, inputs), inputs)


@register_advantage("dr_grpo", grouped=True)
@torch.no_grad()
def dr_grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """R - mean of the group (arXiv:2503.20783); aggregate with seq-mean-token-sum-norm."""
    return finish(spread(centred(inputs.outcomes_B, inputs), inputs), inputs)


@register_advantage("rloo", grouped=True)
@torch.no_grad()
def rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """R minus the mean of the OTHER samples of its group (arXiv:2402.14740)."""
    size_B = group_sizes(inputs)
    return finish(spread(centred(inputs.outcomes_B, inputs) * size_B / (size_B - 1).clamp(min=1), inputs), inputs)


@register_advantage("reinforce_plus_plus_baseline", grouped=True)
@torch.no_grad()
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """R - mean of the group, then whitened over the batch's tokens (arXiv:2501.03262)."""
    advantages_BT = spread(centred(inputs.outcomes_B, inputs), inputs)
    return finish(maybe_whiten(advantages_BT, inputs, options), inputs)


@register_advantage("opo", grouped=True)
@torch.no_grad()
def opo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """R minus the group's mean weighted by length, the variance-optimal baseline (arXiv:2505.23585)."""
    part_B, outcomes_B = inputs.taking_part_B, inputs.outcomes_B.double()
    lengths_B = inputs.active_BT.sum(1).double()
    # A sample's length is that of its rows together: each of them brings its share.
    total_B = group_sum(lengths_B, part_B, inputs.groups_B).clamp(min=1)
    baseline_B = group_sum(lengths_B * outcomes_B, part_B, inputs.groups_B) / total_B
    return finish(spread(blank(outcomes_B - baseline_B, _compared(inputs)), inputs), inputs)


@register_advantage("gpg", grouped=True)
@torch.no_grad()
def gpg(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """alpha (R - mean of the group), alpha = B / (B - M), M of B samples in groups without signal (arXiv:2504.02546).

    Follows the paper; verl's alpha is B / (number of rows whose score is not 0).
    """
    counted_B = inputs.counted_B
    signal = int(groups_with_signal(inputs.outcomes_B, counted_B, inputs.groups_B).sum())
    alpha = int(counted_B.sum()) / max(signal, 1)
    return finish(spread(alpha * centred(inputs.outcomes_B, inputs), inputs), inputs)


@register_advantage("gdpo", grouped=True, whiten_tokens=0.0, **{"weight_*": 1.0})
@torch.no_grad()
def gdpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """GRPO's advantage for every score apart, their weighted sum, whitened over the batch (arXiv:2601.05242).

    Weights are `weight_<score>` (default 1). Whitened over samples, (x - mean) / (std + eps), as the paper and TRL;
    `whiten_tokens=1` whitens over tokens as verl. A KL penalty in the reward is not part of any score, so it is refused
    (`check_algorithm`): put it into the loss.
    """
    if not inputs.score_parts:
        raise ValueError("advantage 'gdpo' needs named scores: the reward function must return several")
    weights = {key.removeprefix("weight_"): value for key, value in options.extra.items() if key.startswith("weight_")}
    unknown = set(weights) - {"*"} - set(inputs.score_parts)
    if unknown:
        raise ValueError(f"weight for unknown score {sorted(unknown)[0]!r}; scores: {', '.join(inputs.score_parts)}")
    total_B = torch.zeros_like(inputs.scores_B, dtype=torch.float64)
    for name, row_scores_B in inputs.score_parts.items():
        inputs.require_finite(f"score_parts[{name!r}]", row_scores_B)
        part_scores_B = inputs.by_sample(row_scores_B)
        scale_B = _scale(part_scores_B, inputs, options) if options.normalize_std else 1.0
        total_B = total_B + weights.get(name, 1.0) * centred(part_scores_B, inputs) / scale_B
    if options.extra["whiten_tokens"]:
        return finish(maybe_whiten(spread(total_B, inputs), inputs, options), inputs)
    if options.whiten:
        counted_B = inputs.counted_B
        total_B = (total_B - masked_mean(total_B, counted_B)) / (masked_var(total_B, counted_B).sqrt() + options.eps)
    return finish(spread(total_B, inputs), inputs)


@register_advantage("grpo_passk", grouped=True, pass_k=0.0)
@torch.no_grad()
def grpo_passk(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """What a sample adds to the best of k answers, on average over the subsets of k of its group that hold it.

    A_i = E[max(S) - max(S without i)]. `pass_k=0` takes k = the whole group: the best one gets its lead over the second
    best, all others 0 (arXiv:2503.19595, verl's grpo_passk); smaller k is the unbiased estimate of arXiv:2505.15201.
    Divided by the group's std + eps when `normalize_std`.
    """
    sizes_B, k = group_sizes(inputs), int(options.extra["pass_k"])
    if k == 1 or k < 0:
        raise ValueError(f"option 'pass_k' is {k}; it must be 0 (the whole group) or at least 2")
    outcomes_B, gains_B = inputs.outcomes_B.double(), torch.zeros_like(inputs.outcomes_B, dtype=torch.float64)
    compared_B = _compared(inputs) & inputs.counted_B
    for group in torch.unique(inputs.groups_B[compared_B]).tolist():
        rows_N = (compared_B & (inputs.groups_B == group)).nonzero().squeeze(1)
        n = int(sizes_B[rows_N[0]])
        gains_B[rows_N] = _gains(outcomes_B[rows_N], min(k or n, n))
    if inputs.samples_B is not None:
        gains_B = group_sum(gains_B, compared_B, inputs.samples_B)
    if options.normalize_std:
        gains_B = gains_B / _scale(inputs.outcomes_B, inputs, options)
    return finish(spread(gains_B, inputs), inputs)


def _gains(scores_N: Tensor, k: int) -> Tensor:
    """[N] expected lead of each score over the best of k - 1 others drawn without replacement, where it leads."""
    n, order_N = len(scores_N), torch.argsort(scores_N, stable=True)
    sorted_N = scores_N[order_N]
    # The best of k - 1 others is the one ranked j when the remaining k - 2 are drawn from the j below it.
    chances_N = torch.tensor([comb(j, k - 2) / comb(n - 1, k - 1) for j in range(n)], dtype=torch.float64)
    leads_NN = (sorted_N[:, None] - sorted_N[None, :]).tril(-1) * chances_N.to(scores_N.device)
    return torch.zeros_like(scores_N).index_copy(0, order_N, leads_NN.sum(1))


def group_sizes(inputs: AdvantageInputs) -> Tensor:
    """int64 [B] samples that take part in each row's group.

    Raises:
        ValueError: no group was given a second sample.
    """
    given_B = group_count(inputs.one_of_each(torch.ones_like(inputs.valid_B)), inputs.groups_B)
    if len(given_B) and int(given_B.max()) < 2:
        raise ValueError("group statistics need at least two rows per prompt: set rollout.n >= 2, or another estimator")
    return group_count(inputs.counted_B, inputs.groups_B)


def _compared(inputs: AdvantageInputs) -> Tensor:
    """bool [B]: rows that take part and have company."""
    return inputs.taking_part_B & (group_sizes(inputs) > 1)


def centred(x_B: Tensor, inputs: AdvantageInputs) -> Tensor:
    """float64 [B] x, which is of samples, minus its group's mean; 0 for a sample alone."""
    return blank(x_B.double() - group_mean(x_B, inputs.counted_B, inputs.groups_B), _compared(inputs))


def _scale(x_B: Tensor, inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    return group_std(x_B, inputs.counted_B, inputs.groups_B) + options.eps
