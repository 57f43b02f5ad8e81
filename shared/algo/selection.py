"""Selections of tokens, made on the whole mini-batch before it is split, so that no split changes them."""

import torch
from torch import Tensor

from .masking import blank, masked_mean


def uniform_noise(seeds_B: Tensor, length: int) -> Tensor:
    """float64 [B, length] in [0, 1), derived from the row's seed and the position alone (SplitMix64).

    Whatever rows share the batch and however wide it is padded, a token's number is the same.

    Args:
        seeds_B: int64 seed of each row.
        length: T.
    """
    positions_T = torch.arange(1, length + 1, dtype=torch.int64, device=seeds_B.device)
    z_BT = seeds_B[:, None] + positions_T * -0x61C8864680B583EB
    z_BT = (z_BT ^ _shift(z_BT, 30)) * -0x40A7B892E31B1A47
    z_BT = (z_BT ^ _shift(z_BT, 27)) * -0x6B2FB644ECCEEE15
    return _shift(z_BT ^ _shift(z_BT, 31), 11).double() / 2**53


def select_tokens(
    loss: str, logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, noise_BT: Tensor, extra: dict[str, float]
) -> Tensor | None:
    """bool [B, T] `selection_BT` of the loss named `loss`, or None when it needs none.

    Args:
        loss: name of the policy loss.
        logprobs_BT: log-probs at the start of the mini-batch.
        advantages_BT: advantages.
        mask_BT: tokens that carry loss.
        noise_BT: `uniform_noise`, breaks ties and draws.
        extra: the loss's numbers, defaults filled in (`POLICY_LOSSES.defaults[loss] | options`).
    """
    if loss == "clip_cov":
        ratio, bounds = extra["clip_cov_ratio"], (extra["clip_cov_lb"], extra["clip_cov_ub"])
        return select_clip_cov(logprobs_BT, advantages_BT, mask_BT, noise_BT, ratio, bounds)
    if loss == "kl_cov":
        return select_kl_cov(logprobs_BT, advantages_BT, mask_BT, noise_BT, extra["kl_cov_ratio"])
    return None


@torch.no_grad()
def covariance(logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T] (log p - mean)(A - mean), means over the mini-batch's tokens (arXiv:2505.22617, eq. 10)."""
    logprobs_BT, advantages_BT = blank(logprobs_BT, mask_BT), blank(advantages_BT, mask_BT)
    centred_BT = logprobs_BT - masked_mean(logprobs_BT, mask_BT)
    return blank(centred_BT * (advantages_BT - masked_mean(advantages_BT, mask_BT)), mask_BT)


def select_clip_cov(
    logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    noise_BT: Tensor,
    ratio: float,
    bounds: tuple[float, float],
) -> Tensor:
    """`ratio` of all tokens (at least one), drawn from those whose covariance lies between `bounds`."""
    covariance_BT = covariance(logprobs_BT, advantages_BT, mask_BT)
    candidates_BT = mask_BT & (covariance_BT > bounds[0]) & (covariance_BT < bounds[1])
    return _first(torch.zeros_like(covariance_BT), noise_BT, candidates_BT, _quota(ratio, mask_BT))


def select_kl_cov(
    logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, noise_BT: Tensor, ratio: float
) -> Tensor:
    """The `ratio` of all tokens (at least one) with the highest covariance."""
    covariance_BT = covariance(logprobs_BT, advantages_BT, mask_BT)
    return _first(-covariance_BT, noise_BT, mask_BT, _quota(ratio, mask_BT))


def _quota(ratio: float, mask_BT: Tensor) -> int:
    return max(int(ratio * int(mask_BT.sum())), 1)


def _first(key_BT: Tensor, noise_BT: Tensor, candidates_BT: Tensor, count: int) -> Tensor:
    """bool [B, T]: the `count` candidates with the smallest key; noise decides among equals."""
    positions_N = candidates_BT.flatten().nonzero().squeeze(1)
    by_noise_N = positions_N[torch.argsort(noise_BT.flatten()[positions_N])]
    order_N = by_noise_N[torch.argsort(key_BT.flatten()[by_noise_N], stable=True)]
    selection_N = torch.zeros(candidates_BT.numel(), dtype=torch.bool, device=candidates_BT.device)
    selection_N[order_N[:count]] = True
    return selection_N.view(candidates_BT.shape)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
