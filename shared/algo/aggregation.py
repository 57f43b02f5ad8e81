"""From a per-token loss map to one number, with denominators counted over the whole mini-batch.

A micro-batch on a replica sees few of the rows that one optimizer step averages over. Dividing by its own counts would
weight tokens by the company they are split with; dividing by `Totals` of the whole mini-batch makes the micro-batch
losses simply add up. The optimizer must therefore SUM gradients over micro-batches and replicas (multiply by the number
of replicas where the framework averages them).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .masking import active_mask, blank

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Totals:
    """Counts over a whole mini-batch: all its micro-batches on all replicas, after every filter."""

    tokens: int
    """Tokens that carry loss."""
    sequences: int
    """Rows with at least one such token."""
    norm_length: int = 1
    """Constant length of seq-mean-token-sum-norm, in tokens: the run's max_tokens."""

    @classmethod
    def count(cls, mask_BT: Tensor, valid_B: Tensor, norm_length: int | None = None) -> "Totals":
        """Counts one batch; `norm_length` defaults to the padded width T."""
        active_BT = active_mask(mask_BT, valid_B)
        width = mask_BT.shape[1] if norm_length is None else norm_length
        return cls(int(active_BT.sum()), int(active_BT.any(1).sum()), max(width, 1))

    @classmethod
    def add(cls, parts: Sequence["Totals"]) -> "Totals":
        """The counts of a mini-batch from those of its parts."""
        length = max((part.norm_length for part in parts), default=1)
        return cls(sum(part.tokens for part in parts), sum(part.sequences for part in parts), length)


def aggregate(loss_BT: Tensor, mask_BT: Tensor, valid_B: Tensor, mode: str, totals: Totals) -> Tensor:
    """This part's share of the mini-batch loss (scalar); the shares of all parts sum to the loss.

    Modes, with N sequences and M tokens in the mini-batch, n_i tokens in row i, L = `totals.norm_length`:
        token-mean               sum_i sum_t l / M              (DAPO, arXiv:2503.14476)
        token-sum                sum_i sum_t l
        seq-mean-token-sum       sum_i sum_t l / N
        seq-mean-token-mean      sum_i (sum_t l / n_i) / N      (GRPO, arXiv:2402.03300)
        seq-mean-token-sum-norm  sum_i sum_t l / (N L)          (Dr. GRPO, arXiv:2503.20783)

    Raises:
        ValueError: unknown mode.
    """
    active_BT = active_mask(mask_BT, valid_B)
    kept_BT = blank(loss_BT, active_BT)
    tokens, sequences = max(totals.tokens, 1), max(totals.sequences, 1)
    if mode == "token-mean":
        return kept_BT.sum() / tokens
    if mode == "token-sum":
        return kept_BT.sum()
    if mode == "seq-mean-token-sum":
        return kept_BT.sum() / sequences
    if mode == "seq-mean-token-mean":
        return (kept_BT.sum(1) / active_BT.sum(1).clamp(min=1)).sum() / sequences
    if mode == "seq-mean-token-sum-norm":
        return kept_BT.sum() / (sequences * totals.norm_length)
    raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(MODES)}")
