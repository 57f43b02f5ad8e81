"""How much a pass computes, and what a device could: for MFU (Chowdhery et al. 2022, appendix B)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .models import Policy, ValueModel
from .scorer import head_dim
from .stages import LAYERS, Elsewhere

PEAK = {
    "H200": 989e12, "H100": 989e12, "H800": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12,
    "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12,
}  # fmt: skip
"""Dense bfloat16 operations a second, from the makers' data sheets; the PCIe forms of some are slower."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """What one device can do in a second; None where that is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for kind, peak in PEAK.items() if kind in name), None)


class Work:
    """Operations of a forward pass; a backward pass takes twice as many.

    A multiplication with a matrix takes 2 operations per weight and token, attention over half of a square of positions
    (it is causal) 4 per pair and channel. The head is applied to response tokens only. Recomputing is not counted. Of a
    model in stages, it is the work of this rank's.
    """

    def __init__(self, model: Policy | ValueModel) -> None:
        head = model.lm.get_output_embeddings() if isinstance(model, Policy) else getattr(model, "head", None)
        weight, body = getattr(head, "weight", None), model.backbone()
        config: Any = body.config
        embedded = {id(module.weight) for module in body.modules() if isinstance(module, nn.Embedding)}
        matrices = [p.numel() for p in body.parameters() if p.ndim >= 2 and id(p) not in embedded]
        self._per_token, self._per_response_token = 2 * sum(matrices), 0 if weight is None else 2 * weight.numel()
        channels: int = head_dim(config) * getattr(config, "num_attention_heads", 0)
        elsewhere = sum(isinstance(module, Elsewhere) for module in getattr(body, LAYERS, ()))
        self._per_pair = 4 * channels * (getattr(config, "num_hidden_layers", 0) - elsewhere)

    def forward(self, totals: Sequence[int], responses: int) -> float:
        """Of rows of so many tokens, with so many response tokens in all."""
        pairs = sum(total * (total + 1) / 2 for total in totals)
        return self._per_token * sum(totals) + self._per_pair * pairs + self._per_response_token * responses
