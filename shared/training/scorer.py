"""A language model's last hidden states before each response token: rows packed, padded or shared by ranks."""

import contextlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import ROWS, Rows, unpackable
from .compress import activations_in_8_bits
from .context import sum_over
from .errors import ModelError
from .sequences import Sequences


class Scorer(nn.Module):
    """What says something about every response token, from a language model's last hidden states."""

    padded: str = "packing is off"
    """Why rows are computed side by side and padded; "": one after another, without padding."""
    context: dist.ProcessGroup | None = None
    """Ranks that share the tokens of unpadded rows."""
    in_8_bits: bool = False
    """Whether activations wait for the backward pass in 8 bits."""
    budget: str = ""
    """What came of micro_batch_tokens=auto, for people."""
    embeds: bool = True
    """Whether tokens become states here; False: on a later stage of a pipeline, where states arrive."""
    arriving_ND: Tensor | None = None
    """States of all tokens of the present pass, from the stage before."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = self.autocast = dtype

    def backbone(self) -> PreTrainedModel:
        """The language model without its head."""
        raise NotImplementedError

    def predicting_states(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Last hidden states [N, D] before N of the response tokens, row by row, and which tokens these are, [B, T].

        They are all tokens that are present, or those whose predecessors this rank of a context has.
        """
        hidden_ND, starts_B, first = self._states(sequences)
        place_BT = starts_B[:, None] + sequences.predictors_BT - first
        mine_BT = sequences.present_BT & (place_BT >= 0) & (place_BT < len(hidden_ND))
        return hidden_ND[place_BT[mine_BT]], mine_BT

    def hand_on(self, sequences: Sequences, count: int) -> Tensor:
        """Hidden states [count, D] for the next stage of a pipeline: of all tokens of a pass, and then zeros."""
        states_ND = self._states(sequences)[0]
        return F.pad(states_ND, (0, 0, 0, count - len(states_ND)))

    def _states(self, sequences: Sequences) -> tuple[Tensor, Tensor, int]:
        """Last hidden states [N, D] of a pass, where its rows begin [B], and the place of the first of these states."""
        ids_BS, real_BS, positions_BS = sequences.input_ids_BS, sequences.attention_mask_BS, sequences.position_ids_BS
        first = 0
        if self.padded:
            starts_B = torch.arange(len(ids_BS), device=ids_BS.device) * ids_BS.shape[1]
            hidden_ND = self._hidden(ids_BS, positions_BS, attention_mask=real_BS.long())
        else:
            starts_B, lengths = sequences.starts_B, sequences.lengths
            both_2N = torch.stack([ids_BS[real_BS], positions_BS[real_BS]])
            if self.context:
                both_2N, lengths, first = _stretch(both_2N, lengths, self.context)
            rows = Rows(lengths, ids_BS.device, self.context)
            hidden_ND = self._hidden(both_2N[:1], both_2N[1:], rows=rows)
        return hidden_ND, starts_B, first

    def of_all(self, values_BT: Tensor) -> Tensor:
        """What the ranks of a context have computed, each of its tokens, together."""
        return sum_over(values_BT, self.context) if self.context else values_BT

    @torch.no_grad()
    def states_of(self, ids_N: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Last hidden states [N, D] of rows of these lengths that lie one after another."""
        positions_N = torch.cat([torch.arange(length, device=ids_N.device) for length in lengths])
        return self._hidden(ids_N[None], positions_N[None], rows=Rows(lengths, ids_N.device))

    def _hidden(self, ids_BS: Tensor, positions_BS: Tensor, **options: Any) -> Tensor:
        body = self.backbone()
        if "position_ids" in inspect.signature(body.forward).parameters:
            options["position_ids"] = positions_BS
        storage = contextlib.nullcontext()
        if self.in_8_bits and torch.is_grad_enabled():
            storage = activations_in_8_bits(self, ids_BS.numel(), head_dim(body.config))
        with storage:
            return body(**self.given(ids_BS), **options, use_cache=False).last_hidden_state.flatten(0, 1)

    def given(self, ids_BS: Tensor) -> dict[str, Tensor]:
        """What the body computes with: tokens, or on a later stage what the one before has made of them."""
        if self.embeds:
            return {"input_ids": ids_BS}
        states_ND = self.arriving_ND
        if states_ND is None:
            # The model is being tried out: any states will do that are the same for the same token.
            channels_D = torch.arange(1, self.backbone().config.hidden_size + 1, device=ids_BS.device)
            states_ND = torch.cos(ids_BS.reshape(-1, 1) * channels_D).to(self.dtype)
        return {"inputs_embeds": states_ND.view(*ids_BS.shape, -1)}


def _stretch(
    both_2N: Tensor, lengths: tuple[int, ...], context: dist.ProcessGroup
) -> tuple[Tensor, tuple[int, ...], int]:
    """Ids and positions of this rank's stretch of a sequence, the rows' lengths and where the stretch begins.

    What is missing to equal stretches is a row more, that nobody looks at.
    """
    missing = -both_2N.shape[1] % context.size()
    stretches = F.pad(both_2N, (0, missing)).chunk(context.size(), 1)
    mine = stretches[context.rank()]
    return mine, (*lengths, missing) if missing else lengths, context.rank() * mine.shape[1]


def head_dim(config: Any) -> int:
    """Channels of one head, by a language model's configuration."""
    return getattr(config, "head_dim", None) or config.hidden_size // max(1, getattr(config, "num_attention_heads", 0))


def pack(model: Scorer, device: torch.device) -> None:
    """Has a model compute rows without padding, if a row's states don't change with the row before it.

    What stands against it is in `model.padded` afterwards. All ranks together.
    """
    body = model.backbone()
    config: Any = body.config
    model.padded = unpackable(body)
    if model.padded:
        return
    usual = config._attn_implementation
    body.set_attn_implementation(ROWS)
    try:
        ids_2N = torch.arange(2, 12, device=device).expand(2, -1).clone() % config.vocab_size
        ids_2N[1, :6] = ids_2N[0, 4:10]
        first_ND, second_ND = (model.states_of(ids_N, (6, 4)) for ids_N in ids_2N)
        # Experts may be given other shapes, and round otherwise.
        few = 10 * torch.finfo(first_ND.dtype).eps
        if (first_ND - second_ND)[6:].norm() > few * first_ND[6:].norm():
            model.padded = f"tokens of {config.model_type} models meet outside of their attention"
    except ModelError as error:
        model.padded = f"{config.model_type}: {error}"
    if model.padded:
        body.set_attn_implementation(usual)
