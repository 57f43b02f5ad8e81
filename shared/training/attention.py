"""Attention over rows that lie one after another in one sequence: a token sees its own row, and nothing is padded.

Registered with transformers under a name of its own, it takes the place of a model's attention; who calls the model
says where rows end (`rows=`). On a GPU in half precision torch's variable-length flash attention does all rows at once,
elsewhere scaled_dot_product_attention does one after the other, which is exact and needs no mask.
"""

import inspect
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .context import my_heads, my_tokens
from .errors import ModelError

ROWS = "sextet_rows"
"""The attention's name in transformers."""
UNKNOWN = ("softcap", "s_aux", "position_bias", "indices", "block_indices")
"""What some families want of their attention, and this one does not do."""
LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers, by transformers' names, whose tokens meet in this attention and nowhere else."""
# Before torch 2.12 there is no such option: the kernel shares key heads without being asked.
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Rows:
    """Where rows end in a sequence of all their tokens."""

    lengths: tuple[int, ...]
    device: torch.device
    context: dist.ProcessGroup | None = None
    """Ranks that share the sequence: each has an equal stretch of it."""

    @cached_property
    def bounds(self) -> Tensor:
        """int32 [rows + 1]: row i is at bounds[i] to bounds[i + 1]."""
        ends = itertools.accumulate(self.lengths, initial=0)
        return torch.tensor(list(ends), dtype=torch.int32, device=self.device)


def attend(
    module: nn.Module,
    query_1HNK: Tensor,
    key_1HNK: Tensor,
    value_1HNK: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    rows: Rows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; without `rows`, its own attention over whole rows of equal length.

    Returns:
        [1, N, H, K], and no weights.

    Raises:
        ModelError: the layer's attention is of a kind that is not known here.
    """
    if rows is None:
        tensors = query_1HNK, key_1HNK, value_1HNK
        return sdpa_attention_forward(module, *tensors, attention_mask, scaling=scaling, **options)
    window = _window(module, options)
    if rows.context:
        query_1HNK, key_1HNK, value_1HNK = (my_heads(t, rows.context) for t in (query_1HNK, key_1HNK, value_1HNK))
    kind = query_1HNK.device.type
    if torch.is_autocast_enabled(kind):
        # Rotary embeddings leave float32, which the kernel for all rows does not do.
        compute = torch.get_autocast_dtype(kind)
        query_1HNK, key_1HNK, value_1HNK = (t.to(compute) for t in (query_1HNK, key_1HNK, value_1HNK))
    if _has_kernel(query_1HNK, value_1HNK):
        out_NHK = _all_at_once(query_1HNK, key_1HNK, value_1HNK, rows, scaling, window)
    else:
        out_NHK = _one_by_one(query_1HNK, key_1HNK, value_1HNK, rows, scaling, window)
    return (my_tokens(out_NHK, rows.context) if rows.context else out_NHK)[None], None


AttentionInterface.register(ROWS, attend)


def _window(module: nn.Module, options: dict[str, Any]) -> int | None:
    """Tokens that a token sees, itself included; None: all before it."""
    unknown = [name for name in UNKNOWN if options.get(name) is not None]
    if unknown or options.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ModelError(f"its attention wants {unknown[0] if unknown else 'to see what comes later'}")
    window = options.get("sliding_window")
    if window is None and getattr(module, "layer_type", None) == "sliding_attention":
        raise ModelError("its attention does not say how far it sees")
    return window


def _has_kernel(query_1HNK: Tensor, value_1HNK: Tensor) -> bool:
    """Whether flash attention does such tensors here."""
    if not query_1HNK.is_cuda or query_1HNK.dtype not in (torch.bfloat16, torch.float16):
        return False
    channels = query_1HNK.shape[-1]
    fits = channels == value_1HNK.shape[-1] <= 256 and channels % 8 == 0
    return fits and torch.cuda.get_device_capability(query_1HNK.device) >= (8, 0)


def _all_at_once(
    query_1HNK: Tensor, key_1HNK: Tensor, value_1HNK: Tensor, rows: Rows, scaling: float | None, window: int | None
) -> Tensor:
    query_NHK, key_NHK, value_NHK = (t[0].transpose(0, 1) for t in (query_1HNK, key_1HNK, value_1HNK))
    longest, back = max(rows.lengths), -1 if window is None else window - 1
    out_NHK = varlen_attn(
        query_NHK, key_NHK, value_NHK, rows.bounds, rows.bounds, longest, longest,
        scale=scaling, window_size=(back, 0), **_GQA,
    )  # fmt: skip
    assert isinstance(out_NHK, Tensor)
    return out_NHK


def _one_by_one(
    query_1HNK: Tensor, key_1HNK: Tensor, value_1HNK: Tensor, rows: Rows, scaling: float | None, window: int | None
) -> Tensor:
    shared = query_1HNK.shape[1] != key_1HNK.shape[1]
    parts = []
    for row in zip(*(t.split(rows.lengths, 2) for t in (query_1HNK, key_1HNK, value_1HNK)), strict=True):
        length, mask = row[0].shape[2], None
        if window is not None and window < length:
            seen = torch.ones(length, length, dtype=torch.bool, device=query_1HNK.device)
            mask = seen.tril().triu(1 - window)
        part = F.scaled_dot_product_attention(
            *row, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=shared
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


def unpackable(body: PreTrainedModel) -> str:
    """Why a model's rows have to be padded, as far as its configuration says; "": nothing speaks against packing."""
    config: Any = body.config
    if not body._supports_attention_backend:
        return f"{config.model_type} models bring their own attention"
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - LAYERS):
        return f"{config.model_type} models have layers of {other[0]}"
    return ""
