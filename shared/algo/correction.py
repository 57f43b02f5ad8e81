"""Rollout correction: the engine that samples and the actor that trains give a token different probabilities.

decoupled: old log-probs are the actor's; the ratio rho = p_actor / p_rollout becomes a weight of each token's loss, or
a reason to leave tokens out. bypass: old log-probs ARE the rollout's (one forward pass less), and the loss's own ratio
corrects. Made on the whole mini-batch before it is split. Sources: TIS (Yao et al. 2025, "Your efficient RL framework
secretly brings you off-policy RL training"), IcePop (Ling team 2025), rejection and names as in verl.
"""

from dataclasses import dataclass, field
from math import log

import torch
from torch import Tensor

from .masking import LOG_RATIO_LIMIT, blank, log_ratio, masked_mean, masked_sum
from .registry import nearest

REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip


@dataclass(frozen=True)
class CorrectionOptions:
    """At most one of token_cap, sequence_cap and token_bounds.

    Raises:
        ValueError: several weights at once, an unknown name, or a threshold out of range.
    """

    mode: str = "none"
    """none, decoupled or bypass."""
    token_cap: float | None = None
    """Truncated importance sampling: weight min(rho, cap) per token."""
    sequence_cap: float | None = None
    """The same with the product of the row's ratios."""
    token_bounds: tuple[float, float] | None = None
    """IcePop: weight rho inside the bounds, 0 outside; such tokens still count in denominators."""
    reject: str = "none"
    """One of REJECTIONS: tokens or rows whose divergence is above the threshold leave the loss and its counts."""
    reject_threshold: float | None = None
    """k1: bound (> 1) of rho and 1 / rho; k2, k3: nats."""

    def __post_init__(self) -> None:
        if self.mode not in ("none", "decoupled", "bypass"):
            raise ValueError(f"unknown correction mode {self.mode!r}; known: none, decoupled, bypass")
        weights = [w for w in ("token_cap", "sequence_cap", "token_bounds") if getattr(self, w) is not None]
        if len(weights) > 1:
            raise ValueError(f"correction has both {weights[0]} and {weights[1]}: choose one")
        if self.mode != "decoupled" and weights:
            raise ValueError(
                f"correction.{weights[0]} needs mode 'decoupled': in mode {self.mode!r} the loss's own ratio corrects"
            )
        if self.reject == "none":
            return
        if self.reject not in REJECTIONS:
            raise ValueError(f"unknown rejection {self.reject!r}; {nearest(self.reject, REJECTIONS)}")
        least = 1.0 if self.reject.endswith("k1") else 0.0
        if self.reject_threshold is None or self.reject_threshold <= least:
            raise ValueError(f"reject={self.reject!r} needs reject_threshold > {least}, not {self.reject_threshold}")


@dataclass(frozen=True)
class Correction:
    """What the update uses."""

    old_logprobs_BT: Tensor
    """The loss's old log-probs."""
    mask_BT: Tensor
    """bool, tokens that carry loss after rejection. Count `Totals` from this one."""
    weights_BT: Tensor | None
    """`rollout_weights_BT` of the loss."""
    metrics: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def correct(
    actor_logprobs_BT: Tensor | None, rollout_logprobs_BT: Tensor, mask_BT: Tensor, options: CorrectionOptions
) -> Correction:
    """Weights, rejection and metrics of a whole mini-batch.

    Args:
        actor_logprobs_BT: by the actor before the step; bypass without rejection works without them.
        rollout_logprobs_BT: by the engine as it sampled.
        mask_BT: bool, sampled tokens of valid rows.
        options: see there.

    Raises:
        ValueError: the actor's log-probs are missing and needed.
    """
    if actor_logprobs_BT is None:
        if options.mode != "bypass" or options.reject != "none":
            raise ValueError(
                f"correction mode {options.mode!r}, reject {options.reject!r}: needs the actor's log-probs"
            )
        return Correction(rollout_logprobs_BT, mask_BT, None)
    log_ratio_BT = log_ratio(actor_logprobs_BT, rollout_logprobs_BT, mask_BT)
    metrics = mismatch_metrics(actor_logprobs_BT, rollout_logprobs_BT, mask_BT)
    kept_BT = mask_BT
    if options.mode != "none" and options.reject != "none":
        kept_BT = mask_BT & _accepted(log_ratio_BT, mask_BT, options.reject, options.reject_threshold or 0.0)
        metrics["rejected_fraction"] = _fraction(~kept_BT, mask_BT)
    weights_BT = _weights(log_ratio_BT, kept_BT, options) if options.mode == "decoupled" else None
    if weights_BT is not None:
        metrics |= _weight_metrics(weights_BT, log_ratio_BT, kept_BT, options)
    old_BT = rollout_logprobs_BT if options.mode == "bypass" else actor_logprobs_BT
    return Correction(old_BT, kept_BT, weights_BT, metrics)


@torch.no_grad()
def mismatch_metrics(actor_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """How far apart engine and actor are, with rho = p_actor / p_rollout; {} without a sampled token.

    kl, k3_kl: KL(rollout || actor) per token, in nats. ppl_ratio: mean over rows of perplexity(actor) /
    perplexity(rollout). chi2_token, chi2_seq: E[rho^2] - 1, of tokens and of whole rows. ess: effective share of the
    tokens, (sum rho)^2 / (n sum rho^2).
    """
    if not mask_BT.any():
        return {}
    log_ratio_BT = log_ratio(actor_logprobs_BT, rollout_logprobs_BT, mask_BT).double()
    rows_B = mask_BT.any(1)
    ratio_BT, row_mean_B = log_ratio_BT.exp(), masked_mean(log_ratio_BT, mask_BT, 1)
    row_sum_B = masked_sum(log_ratio_BT, mask_BT, 1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    difference_BT = blank(actor_logprobs_BT, mask_BT).double() - blank(rollout_logprobs_BT, mask_BT)
    return {
        "kl": -float(masked_mean(log_ratio_BT, mask_BT)),
        "k3_kl": float(masked_mean(torch.expm1(log_ratio_BT) - log_ratio_BT, mask_BT)),
        "logprob_abs_difference": float(masked_mean(difference_BT.abs(), mask_BT)),
        "logprob_abs_difference_max": float(difference_BT.abs().max()),
        "ppl_ratio": float(masked_mean((-row_mean_B).exp(), rows_B)),
        "chi2_token": float(masked_mean(ratio_BT.square(), mask_BT)) - 1,
        "chi2_seq": float(masked_mean((2 * row_sum_B).exp(), rows_B)) - 1,
        "ess": _effective_share(ratio_BT, mask_BT),
    }


def _weights(log_ratio_BT: Tensor, mask_BT: Tensor, options: CorrectionOptions) -> Tensor | None:
    if options.token_cap is not None:
        return blank(log_ratio_BT.exp().clamp(max=options.token_cap), mask_BT)
    if options.sequence_cap is not None:
        row_B1 = log_ratio_BT.sum(1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return blank(row_B1.exp().clamp(max=options.sequence_cap).expand(mask_BT.shape), mask_BT)
    if options.token_bounds is not None:
        ratio_BT = log_ratio_BT.exp()
        return blank(ratio_BT, mask_BT & _inside(ratio_BT, options.token_bounds))
    return None


def _accepted(log_ratio_BT: Tensor, mask_BT: Tensor, reject: str, threshold: float) -> Tensor:
    """bool [B, T], broadcast over the row for the sequence forms."""
    level, _, estimator = reject.rpartition("_")
    divergence_BT = {
        "k1": -log_ratio_BT,
        "k2": log_ratio_BT.square() / 2,
        "k3": torch.expm1(log_ratio_BT) - log_ratio_BT,
    }[estimator]
    if level == "seq_sum":
        divergence_BT = divergence_BT.sum(1, keepdim=True)
    elif level == "seq_mean":
        divergence_BT = masked_mean(divergence_BT, mask_BT, 1)[:, None]
    elif level == "seq_max":
        divergence_BT = divergence_BT.amax(1, keepdim=True)
    return divergence_BT.abs() <= log(threshold) if estimator == "k1" else divergence_BT <= threshold


def _weight_metrics(
    weights_BT: Tensor, log_ratio_BT: Tensor, mask_BT: Tensor, options: CorrectionOptions
) -> dict[str, float]:
    """Mean weight, share of tokens that were cut, effective share of the weights used."""
    if options.token_bounds is not None:
        cut_BT = ~_inside(log_ratio_BT.exp(), options.token_bounds)
    else:
        sums = options.sequence_cap is not None
        raw_BT = log_ratio_BT.sum(1, keepdim=True).expand(mask_BT.shape) if sums else log_ratio_BT
        cut_BT = raw_BT > log(options.sequence_cap or options.token_cap or 1.0)
    return {
        "weight_mean": float(masked_mean(weights_BT, mask_BT)),
        "weight_cut_fraction": _fraction(cut_BT, mask_BT),
        "weight_ess": _effective_share(weights_BT, mask_BT),
    }


def _inside(ratio_BT: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (ratio_BT >= bounds[0]) & (ratio_BT <= bounds[1])


def _fraction(chosen_BT: Tensor, mask_BT: Tensor) -> float:
    return float(masked_mean(chosen_BT.double(), mask_BT))


def _effective_share(weights_BT: Tensor, mask_BT: Tensor) -> float:
    squares = float(masked_sum(weights_BT.double().square(), mask_BT)) * int(mask_BT.sum())
    return float(masked_sum(weights_BT.double(), mask_BT)) ** 2 / squares if squares else 0.0
