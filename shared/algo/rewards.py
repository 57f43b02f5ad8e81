"""From an outcome score to rewards per token, and what is done about answers that are long or were cut."""

import torch
from torch import Tensor

from .masking import at_least_float32, blank, last_position

TRUNCATED = ("keep", "zero", "mask")


def token_rewards(scores_B: Tensor, kl_BT: Tensor | None, coef: float, mask_BT: Tensor) -> Tensor:
    """Rewards per token: the score on the last sampled token, minus `coef` times the KL of every sampled token.

    The score sits on the last position that carries the mask, not on the last position of the response: after a final
    tool token it would be lost. A row without a sampled token gets no reward anywhere.

    Args:
        scores_B: outcome scores; NaN is allowed for rows that are not valid.
        kl_BT: per-token KL estimates, or None.
        coef: weight of the KL.
        mask_BT: True on sampled tokens.

    Returns:
        [B, T], 0 where masked.
    """
    position_B = last_position(mask_BT)
    columns_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    at_end_BT = columns_T == position_B[:, None]
    rewards_BT = blank(scores_B[:, None].expand(mask_BT.shape), at_end_BT)
    return rewards_BT if kl_BT is None else rewards_BT - coef * blank(kl_BT, mask_BT)


def overlong_penalty(lengths_B: Tensor, max_tokens: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """DAPO's soft punishment of length (arXiv:2503.14476, eq. 13), to be added to the score.

    0 up to max_tokens - buffer tokens, then linearly down to -penalty at max_tokens.

    Args:
        lengths_B: response length in tokens, tool tokens included.
        max_tokens: longest response the rollout makes.
        buffer: tokens over which the penalty grows, in 1..max_tokens.
        penalty: its size.

    Raises:
        ValueError: `buffer` out of range.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"overlong_buffer is {buffer}; it must lie in 1..{max_tokens} (max_tokens)")
    excess_B = lengths_B.double() - (max_tokens - buffer)
    return (-(excess_B / buffer).clamp(0, 1) * penalty).float()


def handle_truncated(scores_B: Tensor, valid_B: Tensor, truncated_B: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """What is done about answers cut by max_tokens.

    Args:
        scores_B: outcome scores.
        valid_B: rows that take part.
        truncated_B: True where the answer was cut.
        mode: keep (as scored), zero (scored 0), mask (as scored in baselines, but no loss; TRL's
            mask_truncated_completions, DAPO's overlong filtering).

    Returns:
        scores [B] for the advantages, and bool [B] rows that carry loss.

    Raises:
        ValueError: unknown mode.
    """
    if mode == "keep":
        return scores_B, valid_B
    if mode == "zero":
        return blank(at_least_float32(scores_B), ~(truncated_B & valid_B)), valid_B
    if mode == "mask":
        return scores_B, valid_B & ~truncated_B
    raise ValueError(f"unknown treatment of truncated answers {mode!r}; known: {', '.join(TRUNCATED)}")
