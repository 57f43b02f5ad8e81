"""Two numbers of the next-token distribution that need all its logits."""

import torch
from torch import Tensor

from .masking import at_least_float32, blank


def entropy_from_logits(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """H = -sum_v p_v log p_v in nats over the last dimension; at least float32.

    A token ruled out by a logit of -inf adds nothing (0 log 0 = 0), in value and gradient. Where `mask` (the shape
    without the last dimension) is False the result is 0, whatever the logits.
    """
    if mask is not None:
        logits = blank(logits, mask[..., None])
    logprobs = torch.log_softmax(at_least_float32(logits), dim=-1)
    finite = blank(logprobs, ~torch.isneginf(logprobs))
    entropy = -(finite.exp() * finite).sum(-1)
    return entropy if mask is None else blank(entropy, mask)


def sum_pi_squared(logits: Tensor) -> Tensor:
    """sum_v p_v^2 over the last dimension (optimal token baseline); at least float32."""
    return torch.softmax(at_least_float32(logits), dim=-1).square().sum(-1)
