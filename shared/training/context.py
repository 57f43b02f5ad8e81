"""Context parallelism: ranks share the tokens of a sequence, and for attention its heads (Ulysses, Jacobs et al. 2023).

Every rank computes a stretch of the packed sequence. Around attention an all-to-all turns "my tokens, all heads" into
"all tokens, my heads" and back, so that attention itself is the same as on one rank.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    """Part i of the first dimension goes to rank i; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, gradients[0].contiguous(), group=ctx.group)
        return received, None


class _Sum(torch.autograd.Function):
    """The sum over ranks, of which every rank derives the same loss: its gradient is each rank's own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


_all_to_all = cast(Callable[[Tensor, dist.ProcessGroup], Tensor], _AllToAll.apply)
sum_over = cast(Callable[[Tensor, dist.ProcessGroup], Tensor], _Sum.apply)
"""Adds up what ranks have computed of one tensor, 0 where another has; all ranks use the result in the same way."""


def my_heads(tensor_1HNK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From all H heads of my N tokens to my heads of all ranks' tokens; heads fewer than ranks are repeated."""
    ranks = group.size()
    tensor_HNK = tensor_1HNK[0]
    if tensor_HNK.shape[0] < ranks:
        tensor_HNK = tensor_HNK.repeat_interleave(ranks // tensor_HNK.shape[0], 0)
    parts_RHNK = tensor_HNK.unflatten(0, (ranks, -1)).contiguous()
    return _all_to_all(parts_RHNK, group).transpose(0, 1).flatten(1, 2)[None]


def my_tokens(tensor_NHK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From my H heads of all ranks' tokens to all heads of my tokens: [N / ranks, H x ranks, K]."""
    parts_RNHK = tensor_NHK.unflatten(0, (group.size(), -1)).contiguous()
    return _all_to_all(parts_RNHK, group).transpose(0, 1).flatten(1, 2)


def refused(heads: int, key_heads: int, tp: int, cp: int) -> str:
    """Why heads can't be shared by `cp` ranks once tensor parallelism has cut them, with the arithmetic; else ""."""
    per_rank, keys = heads // tp, key_heads // tp
    if per_rank % cp:
        return f"{heads} heads / parallel.tp={tp} = {per_rank} can't be divided by parallel.cp={cp}"
    if keys % cp and cp % keys:
        return f"{key_heads} key heads / parallel.tp={tp} = {keys} don't divide parallel.cp={cp}, nor it them"
    return ""
