"""Loss of the value model."""

import torch
from torch import Tensor

from .masking import blank


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped value loss 0.5 max((v - R)^2, (clip(v, v_old +- c) - R)^2) per token (as PPO's reference code).

    Args:
        values_BT: values now, with gradient.
        old_values_BT: values when the batch was made.
        returns_BT: targets.
        mask_BT: tokens that carry loss.
        clip_range: c > 0.

    Returns:
        loss_BT, 0 where masked, and metric sums (see metrics.py).
    """
    values_BT, old_BT, returns_BT = (blank(x, mask_BT) for x in (values_BT, old_values_BT, returns_BT))
    clipped_BT = torch.minimum(torch.maximum(values_BT, old_BT - clip_range), old_BT + clip_range)
    plain_BT, limited_BT = (values_BT - returns_BT).square(), (clipped_BT - returns_BT).square()
    loss_BT = blank(0.5 * torch.maximum(plain_BT, limited_BT), mask_BT)
    with torch.no_grad():
        metrics = {
            "clip_fraction_sum": (mask_BT & (limited_BT > plain_BT)).sum().to(loss_BT.dtype),
            "value_sum": values_BT.sum(),
            "error_sum": plain_BT.sum(),
        }
    return loss_BT, metrics
