"""Prompts and responses as padded tensors.

Rows are prompt then response, padded on the right. What is padding is known by position only: a pad id that is also an
ordinary token (often the end-of-sequence token) changes nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.batch.block import Block, Ragged
from shared.batch.columns import PROMPT_IDS, RESPONSE_IDS, RESPONSE_MASK, RowKey
from shared.batch.tensors import padded


@dataclass(frozen=True)
class Sequences:
    """B rows of at most S tokens, with responses of at most T tokens."""

    lengths: tuple[int, ...]
    """Tokens of each row."""
    input_ids_BS: Tensor
    attention_mask_BS: Tensor
    """bool, False for padding."""
    predictors_BT: Tensor
    """Position in S whose output predicts response token t, and before which its value is taken; 0 for padding."""
    response_ids_BT: Tensor
    present_BT: Tensor
    """bool, False for padding."""

    @property
    def position_ids_BS(self) -> Tensor:
        """Positions from 0; those of padding are never attended to."""
        rows, width = self.input_ids_BS.shape
        return torch.arange(width, device=self.input_ids_BS.device).expand(rows, width)

    @property
    def starts_B(self) -> Tensor:
        """Where each row begins when they lie one after another."""
        lengths_B = self.attention_mask_BS.sum(1)
        return lengths_B.cumsum(0) - lengths_B


def collate(block: Block, device: torch.device) -> Sequences:
    """Columns prompt_ids and response_ids as one padded batch.

    Raises:
        ValueError: a prompt is empty (nothing would predict the first response token).
    """
    prompt_B, response_B = row_lengths(block)
    if not prompt_B.all():
        key = block.rows[int(np.argmin(prompt_B))]
        raise ValueError(f"row {key} has an empty prompt: its first response token has no context")
    input_ids_BS = np.zeros((len(block), int((prompt_B + response_B).max(initial=0))), np.int64)
    columns_S = np.arange(input_ids_BS.shape[1])
    in_prompt_BS = columns_S < prompt_B[:, None]
    in_row_BS = columns_S < (prompt_B + response_B)[:, None]
    input_ids_BS[in_prompt_BS] = block[PROMPT_IDS].data
    input_ids_BS[in_row_BS & ~in_prompt_BS] = block[RESPONSE_IDS].data
    steps_T = np.arange(int(response_B.max(initial=0)))
    present_BT = steps_T < response_B[:, None]
    predictors_BT = np.where(present_BT, prompt_B[:, None] - 1 + steps_T, 0)
    response_ids_BT = np.zeros(present_BT.shape, np.int64)
    response_ids_BT[present_BT] = block[RESPONSE_IDS].data
    arrays = (input_ids_BS, in_row_BS, predictors_BT, response_ids_BT, present_BT)
    lengths = tuple((prompt_B + response_B).tolist())
    return Sequences(lengths, *(torch.from_numpy(array).to(device) for array in arrays))


def row_lengths(block: Block) -> tuple[np.ndarray, np.ndarray]:
    """[B] int64: tokens of each row's prompt and of its response."""
    return block[PROMPT_IDS].lengths.astype(np.int64), block[RESPONSE_IDS].lengths.astype(np.int64)


def per_token(block: Block, name: str, device: torch.device | None = None) -> Tensor:
    """A column of one element per response token as [B, T]: bool for masks, else as it is stored; 0 where padded.

    Raises:
        ValueError: there is no such column, or a row of it is not as long as its response.
    """
    if name not in block:
        raise ValueError(f"column {name!r} is missing; the batch has {', '.join(block.columns)}")
    # Rows that are known in outline only have no ids, but a mask.
    like = block[RESPONSE_IDS if RESPONSE_IDS in block else RESPONSE_MASK]
    off_B = block[name].lengths != like.lengths
    if off_B.any():
        row = int(np.argmax(off_B))
        count, length = int(block[name].lengths[row]), int(like.lengths[row])
        raise ValueError(f"column {name!r} has {count} elements in row {block.rows[row]}, whose response has {length}")
    tensor_BT = padded(block[name])
    return (tensor_BT.bool() if tensor_BT.dtype == torch.uint8 else tensor_BT).to(device)


def trainable(block: Block) -> list[RowKey]:
    """Rows with at least one token in `response_mask`; the others take no part in an update."""
    return [key for key, mask in zip(block.rows, block[RESPONSE_MASK].rows(), strict=True) if mask.any()]


def token_mean(block: Block, column: Ragged) -> float:
    """Mean of a per-token column over the tokens in the block's `response_mask`; 0 without any."""
    chosen = column.data[block[RESPONSE_MASK].data.astype(bool)]
    return float(chosen.mean(dtype=np.float64)) if chosen.size else 0.0
