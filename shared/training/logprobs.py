"""Log-probs and entropy of response tokens from hidden states, without ever holding all logits.

Logits are made in chunks of tokens, only where a response token is predicted: a prompt's logits never exist, and a
chunk's logits are made again in the backward pass instead of being kept. The head's gradient is summed over chunks in
float32, whatever the chunks are computed in. Where ranks share the words (tensor parallel), each makes its own only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from shared.algo.masking import at_least_float32

from .context import sum_over

CHUNK_ELEMENTS = 2**24
"""Logits that exist at a time: 64 MiB in float32, 340 tokens of a 49,152-word vocabulary."""


@dataclass(frozen=True)
class TokenScores:
    """What a policy says about response tokens; 0 where padded."""

    logprobs_BT: Tensor
    """Of the tokens that are there, at the sampling temperature, at least float32."""
    entropy_BT: Tensor
    """Of the whole next-token distribution at the same temperature, in nats."""
    sum_pi_squared_BT: Tensor
    """Sum over the vocabulary of squared probabilities; no gradient (optimal token baseline)."""


@dataclass(frozen=True)
class Words:
    """Ranks that make the logits of some words each, and the first of this rank's."""

    ranks: dist.ProcessGroup
    first: int


# fully_shard looks for the tensors in what a model returns, to gather its parameters again before their backward pass.
register_dataclass(TokenScores)


def score_tokens(
    hidden_ND: Tensor,
    token_ids_BT: Tensor,
    present_BT: Tensor,
    head: Callable[[Tensor], Tensor],
    layer: nn.Module,
    temperature: float,
    *,
    chunk: int,
    words: Words | None = None,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Scores the tokens that `present_BT` marks.

    Args:
        hidden_ND: last hidden states that predict the tokens, in the order in which `present_BT` has them.
        token_ids_BT: the tokens.
        present_BT: bool, with N of them True.
        head: hidden states [N, D] to logits [N, V], or to this rank's part of `words`.
        layer: whose parameters `head` uses.
        temperature: > 0; logits are divided by it.
        chunk: tokens whose logits exist at a time.
        words: who else has logits, of the same tokens.
        entropy_gradient: the entropy is part of a loss.
    """
    chunks = _Chunks(token_ids_BT[present_BT], head, layer, temperature, chunk, words, entropy_gradient)
    columns = cast(Callable[..., tuple[Tensor, ...]], _Scores.apply)(chunks, hidden_ND, *chunks.trained())
    return TokenScores(*(scatter(values_N, present_BT) for values_N in columns))


@dataclass(frozen=True)
class _Chunks:
    """How hidden states become scores, some at a time."""

    ids_N: Tensor
    head: Callable[[Tensor], Tensor]
    layer: nn.Module
    temperature: float
    size: int
    words: Words | None
    entropy_gradient: bool

    def trained(self) -> list[nn.Parameter]:
        """The head's parameters as they are now: between passes FSDP puts others in their place."""
        return [p for p in self.layer.parameters() if p.requires_grad]

    def slices(self) -> list[slice]:
        """At least one: without a token, too, the head has a gradient."""
        return [slice(start, start + self.size) for start in range(0, max(1, len(self.ids_N)), self.size)]

    def scores(self, hidden_CD: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        logits_CV, ids_C = at_least_float32(self.head(hidden_CD)) / self.temperature, self.ids_N[part]
        if self.words:
            return _among_ranks(logits_CV, ids_C, self.words, self.entropy_gradient)
        all_CV = torch.log_softmax(logits_CV, dim=-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_gradient):
            probabilities_CV = all_CV.exp()
            # A word ruled out by a logit of -inf adds nothing: 0 log 0 = 0.
            entropy_C = -(probabilities_CV * all_CV.masked_fill(all_CV.isneginf(), 0)).sum(1)
        logprobs_C = all_CV.gather(1, ids_C[:, None]).squeeze(1)
        return logprobs_C, entropy_C, probabilities_CV.detach().square().sum(1)


def _among_ranks(
    logits_CV: Tensor, ids_C: Tensor, words: Words, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of logits that ranks share. What ranks add up must not depend on what they have added up before: such a
    sum's gradient would be on the ranks that used it, and nowhere else.
    """
    highest_C = logits_CV.detach().amax(1)
    dist.all_reduce(highest_C, dist.ReduceOp.MAX, group=words.ranks)
    shifted_CV = logits_CV - highest_C[:, None]
    exp_CV = shifted_CV.exp()
    place_C = ids_C - words.first
    mine_C = (place_C >= 0) & (place_C < logits_CV.shape[1])
    chosen_C = shifted_CV.gather(1, torch.where(mine_C, place_C, 0)[:, None]).squeeze(1)
    sums_2C = torch.stack([exp_CV.sum(1), torch.where(mine_C, chosen_C, 0)])
    total_C, chosen_C = sum_over(sums_2C, words.ranks)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        finite_CV = shifted_CV.masked_fill(shifted_CV.isneginf(), 0)
        sums_2C = torch.stack([(exp_CV * finite_CV).sum(1), exp_CV.detach().square().sum(1)])
        weighted_C, squares_C = sum_over(sums_2C, words.ranks)
        entropy_C = total_C.log() - weighted_C / total_C
    return chosen_C - total_C.log(), entropy_C, (squares_C / total_C.square()).detach()


class _Scores(torch.autograd.Function):
    """Log-probs, entropies and sums of squared probabilities [N]; the backward pass goes through the chunks again."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, hidden_ND: Tensor, *_trained: nn.Parameter) -> tuple[Tensor, ...]:
        kind = hidden_ND.device.type
        ctx.chunks, ctx.autocast = chunks, (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(hidden_ND)
        parts = [chunks.scores(hidden_ND[part], part) for part in chunks.slices()]
        columns = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*columns[1 + chunks.entropy_gradient :])
        return columns

    @staticmethod
    def backward(ctx: Any, *gradients_N: Tensor) -> tuple[Tensor | None, ...]:
        chunks: _Chunks = ctx.chunks
        (hidden_ND,) = ctx.saved_tensors
        trained, hidden_gradient_ND = chunks.trained(), torch.empty_like(hidden_ND)
        totals: list[Tensor] = []
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            for part in chunks.slices():
                hidden_CD = hidden_ND[part].detach().requires_grad_()
                outputs = chunks.scores(hidden_CD, part)[: 1 + chunks.entropy_gradient]
                above = [gradient_N[part] for gradient_N in gradients_N[: len(outputs)]]
                hidden_gradient_ND[part], *found = torch.autograd.grad(outputs, [hidden_CD, *trained], above)
                if totals:
                    for total, gradient in zip(totals, found, strict=True):
                        total.add_(gradient)
                else:
                    totals = [at_least_float32(gradient) for gradient in found]
        return None, hidden_gradient_ND, *(total.to(p.dtype) for total, p in zip(totals, trained, strict=True))


def scatter(values_N: Tensor, present_BT: Tensor) -> Tensor:
    """Values back to their places, 0 elsewhere."""
    return torch.zeros(present_BT.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(
        present_BT, values_N
    )
