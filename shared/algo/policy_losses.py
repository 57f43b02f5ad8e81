"""Policy losses by name: what they are given, what they return, what they share.

A loss returns a map per token; `aggregation.aggregate` makes one number of it. Sequence-level methods put the row's
loss on each of its tokens: aggregate those with seq-mean-token-mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .masking import blank
from .registry import Registry


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a policy loss sees of a micro-batch. All [B, T], padded on the right, response tokens only."""

    logprobs_BT: Tensor
    """Of the sampled tokens under the policy in training, with gradient."""
    old_logprobs_BT: Tensor
    """Under the policy at the start of the step (decoupled), or as the engine sampled them (bypass)."""
    advantages_BT: Tensor
    mask_BT: Tensor
    """bool, tokens that carry loss: sampled, of a valid row, not rejected."""
    rollout_weights_BT: Tensor | None = None
    """Each token's loss is multiplied by it (rollout correction). No gradient."""
    selection_BT: Tensor | None = None
    """bool, tokens chosen on the whole mini-batch before it was split (`selection.select_tokens`)."""


@dataclass(frozen=True)
class PolicyLossOptions:
    """Numbers of the losses; a loss reads only its own."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = None
    """Dual clip: bound (> 1) of the ratio where the advantage is negative; None is off (verl: 3)."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of one loss, checked against those it declared."""


LossMap = tuple[Tensor, dict[str, Tensor]]
"""loss_BT, 0 where masked; metric sums (see metrics.py)."""
PolicyLoss = Callable[[PolicyLossInputs, PolicyLossOptions], LossMap]
POLICY_LOSSES: Registry[PolicyLossInputs, PolicyLossOptions, LossMap] = Registry("policy loss")


def register_policy_loss(name: str, **defaults: float) -> Callable[[PolicyLoss], PolicyLoss]:
    """Enters a loss under `name`: (inputs, options) -> (loss_BT, metric sums).

    Args:
        name: as `algorithm.policy_loss` names it.
        defaults: further numbers it reads from `options.extra`.
    """
    return POLICY_LOSSES.register(name, **defaults)


def policy_loss(name: str) -> PolicyLoss:
    """The loss registered as `name`; ValueError names the nearest one otherwise."""
    return POLICY_LOSSES.find(name)


def finish_loss(
    loss_BT: Tensor, log_ratio_BT: Tensor, inputs: PolicyLossInputs, metrics: dict[str, Tensor] | None = None
) -> LossMap:
    """Applies the rollout weights, blanks masked positions, and adds the metrics every loss has.

    Metrics say how far the policy moved from the old one: k1 and k3 (both estimate KL(old || new)) and the ratio.
    """
    mask_BT = inputs.mask_BT
    if inputs.rollout_weights_BT is not None:
        loss_BT = loss_BT * blank(inputs.rollout_weights_BT, mask_BT).detach()
    log_ratio_BT = blank(log_ratio_BT.detach(), mask_BT)
    ratio_BT = log_ratio_BT.exp()
    seen_N, nothing = ratio_BT[mask_BT], ratio_BT.new_tensor(torch.inf)
    moved = {
        "approx_kl_sum": -log_ratio_BT.sum(),
        "approx_kl_k3_sum": (torch.expm1(log_ratio_BT) - log_ratio_BT).sum(),
        "ratio_sum": blank(ratio_BT, mask_BT).sum(),
        "ratio_max": seen_N.amax() if len(seen_N) else -nothing,
        "ratio_min": seen_N.amin() if len(seen_N) else nothing,
    }
    return blank(loss_BT, mask_BT), {**moved, **(metrics or {})}


def count(chosen_BT: Tensor, inputs: PolicyLossInputs) -> Tensor:
    """Number of loss-carrying tokens that are chosen, as a metric sum."""
    return (chosen_BT & inputs.mask_BT).sum().double()
