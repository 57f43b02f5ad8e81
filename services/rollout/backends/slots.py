"""A key-value cache of fixed slots, and attention over it, for any Hugging Face model with plain attention.

Each of B slots holds one row in its own [H, L, D] buffers, at its own position. Shapes never change while a run lasts:
that is what makes a row's bits independent of its neighbours.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from services.rollout.backend import EngineError

ATTENTION = "sextet_slots"

# Arguments of attention functions that change no result here.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "is_causal", "cache_position", "output_router_logits"}
)


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [B, H, L, D]; `update` writes each row's new token at the row's own position."""

    def __init__(self, slots: int, length: int, positions_B: Tensor) -> None:
        super().__init__()
        self.slots, self.length = slots, length
        self.positions_B = positions_B
        self.rows_B = torch.arange(slots, device=positions_B.device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            torch.zeros(self.slots, s.shape[1], self.length, s.shape[3], dtype=s.dtype, device=s.device)
            for s in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        self.keys[self.rows_B, :, self.positions_B] = key_states[:, :, 0]
        self.values[self.rows_B, :, self.positions_B] = value_states[:, :, 0]
        return self.keys, self.values

    def place(self, slot: int, keys_HTD: Tensor, values_HTD: Tensor) -> None:
        """Puts a prefilled prompt into a slot."""
        if not self.is_initialized:
            self.lazy_initialization(keys_HTD[None], values_HTD[None])
        assert self.keys is not None
        assert self.values is not None
        self.keys[slot, :, : keys_HTD.shape[1]] = keys_HTD
        self.values[slot, :, : values_HTD.shape[1]] = values_HTD

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.length


class SlotCache(Cache):
    """The cache of all layers. `at` says where the rows are before a forward pass."""

    def __init__(self, layers: int, slots: int, length: int, device: torch.device) -> None:
        self.positions_B = torch.zeros(slots, dtype=torch.long, device=device)
        self._columns_L = torch.arange(length, device=device)
        super().__init__(layers=[SlotLayer(slots, length, self.positions_B) for _ in range(layers)])

    def at(self, positions: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Sets each row's position and answers the additive mask [B, 1, 1, L] that shows it what it has written."""
        self.positions_B.copy_(torch.tensor(positions))
        hidden_BL = self._columns_L > self.positions_B[:, None]
        return torch.zeros(hidden_BL.shape, dtype=dtype, device=hidden_BL.device).masked_fill_(
            hidden_BL, float("-inf")
        )[:, None, None]

    def place(self, slot: int, prefilled: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Puts a prompt's keys and values, [H, T, D] of every layer, into a slot."""
        for layer, (keys_HTD, values_HTD) in zip(self.layers, prefilled, strict=True):
            layer.place(slot, keys_HTD, values_HTD)  # type: ignore[union-attr]

    def clear(self) -> None:
        """Zeroes everything: what is masked must at least be finite, and old weights leave nothing behind."""
        for layer in self.layers:
            layer.reset()


def slot_attention(
    module: nn.Module,
    query_BHQD: Tensor,
    key_BHLD: Tensor,
    value_BHLD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a whole prompt (no mask: causal) or of one token per slot (masked).

    Query heads that share a key head are attended as its queries, so that keys are never repeated in memory.
    """
    _refuse_extras(kwargs, key_BHLD.shape[2])
    rows, heads, queries, width = query_BHQD.shape
    groups = heads // key_BHLD.shape[1]
    if queries == 1:
        grouped = query_BHQD.reshape(rows, key_BHLD.shape[1], groups, width)
        mask = None if attention_mask is None else attention_mask.expand(-1, -1, groups, -1)
        attended = nn.functional.scaled_dot_product_attention(grouped, key_BHLD, value_BHLD, mask, scale=scaling)
        return attended.reshape(rows, 1, heads, -1), None
    attended = nn.functional.scaled_dot_product_attention(
        query_BHQD, key_BHLD, value_BHLD, is_causal=True, scale=scaling, enable_gqa=groups > 1
    )
    return attended.transpose(1, 2).contiguous(), None


def use_slot_attention(model: PreTrainedModel, length: int) -> None:
    """Makes the model attend through `slot_attention`.

    Raises:
        EngineError: its attention is not plain: other state than keys and values, or a window shorter than `length`.
    """
    kind = model.config.model_type
    if model.config.is_encoder_decoder or not getattr(model, "_supports_attention_backend", False):
        raise EngineError(f"the hf engine cannot decode {kind} models: their attention cannot be replaced; use vllm")
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= length:
            continue
        if type(layer) is not DynamicLayer:
            raise EngineError(
                f"the hf engine cannot decode {kind} models: a layer keeps {type(layer).__name__}, not keys and values "
                f"of all {length} positions; use rollout.engine=vllm, or fewer tokens"
            )
    AttentionInterface.register(ATTENTION, slot_attention)
    model.set_attn_implementation(ATTENTION)


def _refuse_extras(kwargs: dict[str, Any], length: int) -> None:
    for name, value in kwargs.items():
        if value is None or name in _HARMLESS or (name == "sliding_window" and value >= length):
            continue
        raise EngineError(f"the hf engine cannot decode this model: its attention takes {name}={value!r:.40}; use vllm")
