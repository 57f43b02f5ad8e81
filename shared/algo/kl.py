"""Estimators of KL(policy || reference) from the sampled tokens' log-probs, and controllers of its coefficient.

Source of the estimators: J. Schulman, "Approximating KL divergence" (2020). With x sampled from p and
r = q(x) / p(x):  k1 = -log r,  k2 = (log r)^2 / 2,  k3 = r - 1 - log r.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .masking import log_ratio

ESTIMATORS = ("k1", "abs", "k2", "k3")


def kl_estimate(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor, estimator: str) -> Tensor:
    """Per-token KL [B, T] in nats, 0 where masked; differentiable in `logprobs_BT`.

    Names follow verl: k1 (also kl), abs, k2 (also mse), k3 (also low_var_kl). A `+` after the name is the
    straight-through form: the value is that estimator's, the gradient is k2's, which is the unbiased one of the three
    as a loss (k1's expected gradient is zero, k3's is that of the reverse direction). Unlike verl, k3 has no further
    clamp to +-10: the log-ratio's own clamp keeps it finite.

    Raises:
        ValueError: unknown estimator.
    """
    name = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(estimator.removesuffix("+"), estimator.removesuffix("+"))
    difference_BT = log_ratio(logprobs_BT, reference_logprobs_BT, mask_BT)
    if name == "k1":
        value_BT = difference_BT
    elif name == "abs":
        value_BT = difference_BT.abs()
    elif name == "k2":
        value_BT = difference_BT.square() / 2
    elif name == "k3":
        value_BT = torch.expm1(-difference_BT) + difference_BT
    else:
        raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(ESTIMATORS)}, each also with '+'")
    if not estimator.endswith("+"):
        return value_BT
    gradient_BT = difference_BT.square() / 2
    return gradient_BT - gradient_BT.detach() + value_BT.detach()


@dataclass(frozen=True)
class FixedKL:
    """A coefficient that stays."""

    coef: float

    def update(self, kl: float, samples: int) -> "FixedKL":
        """Itself, whatever was measured."""
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A coefficient steered towards a target KL (Ziegler et al., arXiv:1909.08593, section 2.2)."""

    coef: float
    target: float
    """Nats per token, in the same unit as `update` is told."""
    horizon: int
    """Samples over which a full error moves the coefficient by 20 %."""

    def update(self, kl: float, samples: int) -> "AdaptiveKL":
        """The controller after a step of `samples` rows whose mean KL was `kl`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * samples / self.horizon))
