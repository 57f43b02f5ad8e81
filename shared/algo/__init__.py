"""Reinforcement learning as pure functions on tensors: torch and nothing else.

Conventions: tensors [B, T] are padded on the right and hold response tokens only; `mask_BT` is True where the policy
sampled the token; `valid_B` is False where a row takes no part. See docs/algorithms.md.
"""

from . import estimators_group, estimators_return, losses_clip, losses_plain
from .advantages import (
    ADVANTAGES,
    GROUPED_ADVANTAGES,
    AdvantageInputs,
    AdvantageOptions,
    Advantages,
    advantage_estimator,
    register_advantage,
)
from .aggregation import MODES, Totals, aggregate
from .check import check_algorithm
from .correction import REJECTIONS, Correction, CorrectionOptions, correct, mismatch_metrics
from .entropy import entropy_from_logits, sum_pi_squared
from .groups import groups_with_signal
from .kl import AdaptiveKL, FixedKL, kl_estimate
from .masking import active_mask, log_ratio, masked_mean, masked_sum, masked_whiten
from .metrics import combine_metrics, finish_metrics
from .policy_losses import POLICY_LOSSES, PolicyLossInputs, PolicyLossOptions, policy_loss, register_policy_loss
from .rewards import handle_truncated, overlong_penalty, token_rewards
from .selection import select_tokens, uniform_noise
from .value_loss import value_loss

__all__ = [
    "ADVANTAGES",
    "GROUPED_ADVANTAGES",
    "MODES",
    "POLICY_LOSSES",
    "REJECTIONS",
    "AdaptiveKL",
    "AdvantageInputs",
    "AdvantageOptions",
    "Advantages",
    "Correction",
    "CorrectionOptions",
    "FixedKL",
    "PolicyLossInputs",
    "PolicyLossOptions",
    "Totals",
    "active_mask",
    "advantage_estimator",
    "aggregate",
    "check_algorithm",
    "combine_metrics",
    "correct",
    "entropy_from_logits",
    "estimators_group",
    "estimators_return",
    "finish_metrics",
    "groups_with_signal",
    "handle_truncated",
    "kl_estimate",
    "log_ratio",
    "losses_clip",
    "losses_plain",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "mismatch_metrics",
    "overlong_penalty",
    "policy_loss",
    "register_advantage",
    "register_policy_loss",
    "select_tokens",
    "sum_pi_squared",
    "token_rewards",
    "uniform_noise",
    "value_loss",
]
