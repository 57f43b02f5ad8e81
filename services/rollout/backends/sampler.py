"""Draws tokens: one number per token from the row's own seed, inverse CDF over the row's own distribution.

Every operation here is per row and has the same shape at every step, so a row's draw is bit-equal whatever its
neighbours are (law 7). `tests/unit/services/rollout/test_sampler.py` holds it to the plain definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.rollout.backend import Likely, SamplingParams

_BLOCK = 256
_MASK64 = 2**64 - 1


@dataclass(frozen=True)
class Draw:
    """What one row wants drawn: response token number `position` of the row seeded with `seed`."""

    params: SamplingParams
    seed: int
    position: int


def uniform(seed: int, position: int) -> float:
    """Number `position` of the sequence of `seed`, in [0, 1): SplitMix64, whose state is a counter.

    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014).
    """
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def draw(logits_NV: Tensor, draws: Sequence[Draw | None]) -> tuple[list[int], list[float], list[bool]]:
    """Draws one token per row.

    Args:
        logits_NV: any float type.
        draws: one per row; None for a row that nobody wants.

    Returns:
        Token ids; their log-probs under log_softmax(logits / temperature) in float32, before min_tokens, top_k and
        top_p; and whether the row's distribution was finite.
    """
    device = logits_NV.device
    params = [d.params if d else SamplingParams() for d in draws]
    temperature_N1 = torch.tensor([[p.temperature] for p in params], dtype=torch.float32, device=device)
    scaled_NV = logits_NV.float() / temperature_N1
    logprobs_NV = torch.log_softmax(scaled_NV, dim=-1)
    weights_NV = logprobs_NV.exp()
    _forbid_stops(weights_NV, scaled_NV, draws)
    _keep_likely(weights_NV, params)
    numbers_N = [uniform(d.seed, d.position) if d else 0.0 for d in draws]
    drawn_N = inverse_cdf(weights_NV, torch.tensor(numbers_N, dtype=torch.float64, device=device))
    if any(p.greedy for p in params):
        greedy_N = torch.tensor([p.greedy for p in params], device=device)
        drawn_N = torch.where(greedy_N, weights_NV.argmax(-1), drawn_N)
    token_logprobs_N = logprobs_NV.gather(1, drawn_N[:, None])[:, 0]
    return drawn_N.tolist(), token_logprobs_N.tolist(), torch.isfinite(token_logprobs_N).tolist()


def likely(logits_V: Tensor, params: SamplingParams) -> Likely:
    """The most likely tokens under log_softmax(logits / temperature)."""
    logprobs_V = torch.log_softmax(logits_V.float() / params.temperature, dim=-1)
    best = logprobs_V.topk(min(params.likely, len(logprobs_V)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def inverse_cdf(weights_NV: Tensor, numbers_N: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds number * total, in float64; never one of weight 0.

    In two levels (blocks of tokens, then tokens of a block), which reads the vocabulary once and scans little of it.
    """
    rows, vocabulary = weights_NV.shape
    if vocabulary % _BLOCK:
        weights_NV = torch.nn.functional.pad(weights_NV, (0, _BLOCK - vocabulary % _BLOCK))
    blocks_NKV = weights_NV.view(rows, -1, _BLOCK)
    cumulative_NK = blocks_NKV.sum(-1, dtype=torch.float64).cumsum(-1)
    targets_N1 = _below(numbers_N[:, None] * cumulative_NK[:, -1:], cumulative_NK[:, -1:])
    block_N1 = torch.searchsorted(cumulative_NK, targets_N1, right=True).clamp_(max=blocks_NKV.shape[1] - 1)
    before_N1 = torch.where(block_N1 > 0, cumulative_NK.gather(1, (block_N1 - 1).clamp_(min=0)), 0)
    inside_NV = blocks_NKV[torch.arange(rows, device=weights_NV.device), block_N1[:, 0]].double().cumsum(-1)
    rest_N1 = _below((targets_N1 - before_N1).clamp_(min=0), inside_NV[:, -1:])
    inside_N1 = torch.searchsorted(inside_NV, rest_N1, right=True).clamp_(max=_BLOCK - 1)
    return (block_N1 * _BLOCK + inside_N1)[:, 0].clamp_(max=vocabulary - 1)


def _below(values: Tensor, limits: Tensor) -> Tensor:
    """Rounding may lift a value to its limit, where no token is."""
    return torch.minimum(values, torch.nextafter(limits, torch.zeros_like(limits)))


def _forbid_stops(weights_NV: Tensor, scaled_NV: Tensor, draws: Sequence[Draw | None]) -> None:
    for row, d in enumerate(draws):
        if d and d.position < d.params.min_tokens and d.params.stop_token_ids:
            # Before the softmax: next to a very likely stop token all others may round to 0.
            scaled_NV[row, list(d.params.stop_token_ids)] = float("-inf")
            weights_NV[row] = torch.softmax(scaled_NV[row], dim=-1)


def _keep_likely(weights_NV: Tensor, params: Sequence[SamplingParams]) -> None:
    """Zeroes what top_k, and then top_p of what is left, leaves out; of equal weights all or none are kept."""
    for row, p in enumerate(params):
        if p.greedy or (p.top_k == 0 and p.top_p == 1):
            continue
        weights_V = weights_NV[row]
        # On the CPU: a long one-dimensional cumsum on CUDA gives other last bits from one call to the next.
        sorted_V = weights_V.cpu().sort(descending=True).values
        if 0 < p.top_k < sorted_V.shape[0]:
            sorted_V = sorted_V[: int((sorted_V >= sorted_V[p.top_k - 1]).sum())]
        cumulative_V = sorted_V.double().cumsum(-1)
        # A token is kept while those before it do not reach top_p: the first is always kept.
        kept = int((cumulative_V - sorted_V < p.top_p * cumulative_V[-1]).sum()) if p.top_p < 1 else len(sorted_V)
        weights_V.masked_fill_(weights_V < float(sorted_V[max(kept, 1) - 1]), 0)
