"""Sums over the tokens that count.

Every function blanks what is masked with `torch.where` before it computes, so NaN or infinity in padding, tool
tokens or invalid rows reaches neither a value nor a gradient (0 * NaN is NaN; multiplying by a mask is not enough).
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound of every log-ratio before `exp`: exp(20) = 4.9e8 is far beyond any useful ratio and far from overflow."""


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def blank(x: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`x` where `mask`, else `fill`; at least float32. No gradient flows to masked positions."""
    x = at_least_float32(x)
    return torch.where(mask, x, torch.full((), fill, dtype=x.dtype, device=x.device))


def active_mask(mask_BT: Tensor, valid_B: Tensor) -> Tensor:
    """bool [B, T]: sampled tokens of rows that take part."""
    return mask_BT & valid_B[:, None]


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `x` over `mask`; over everything when `dim` is None."""
    x = blank(x, mask)
    return x.sum() if dim is None else x.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `x` over `mask`; 0 where the mask is empty."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Sample variance (n - 1) of `x` over `mask`; 0 for fewer than two elements."""
    deviations = blank(x - masked_mean(x, mask), mask)
    return deviations.square().sum() / (mask.sum() - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) over `mask`, 0 elsewhere; `shift_mean=False` keeps the mean."""
    mean = masked_mean(x, mask)
    whitened = (x - mean) * torch.rsqrt(masked_var(x, mask) + eps)
    return blank(whitened if shift_mean else whitened + mean, mask)


def log_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(p / p_base) in at least float32, clamped to +-20, 0 where masked. Shapes are equal.

    Beyond the clamp the gradient is zero.
    """
    difference = blank(logprobs, mask) - blank(base_logprobs, mask)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def last_position(mask_BT: Tensor) -> Tensor:
    """int64 [B]: index of the last True of each row, -1 for a row without one."""
    positions_T = torch.arange(1, mask_BT.shape[1] + 1, device=mask_BT.device)
    if mask_BT.shape[1] == 0:
        return torch.full((mask_BT.shape[0],), -1, dtype=torch.int64, device=mask_BT.device)
    return (mask_BT * positions_T).amax(1) - 1
