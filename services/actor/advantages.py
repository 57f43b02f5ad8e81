"""From samples, scores and log-probs to the training batch: rewards per token, advantages, what carries loss."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.algo import (
    AdvantageInputs,
    AdvantageOptions,
    Advantages,
    CorrectionOptions,
    advantage_estimator,
    correct,
    handle_truncated,
    kl_estimate,
    masked_mean,
    overlong_penalty,
    token_rewards,
)
from shared.batch import columns
from shared.batch.block import Block
from shared.batch.tensors import ragged_from_padded, ragged_from_scalars, scalars
from shared.config import RunConfig
from shared.training.sequences import per_token, row_lengths

REQUIRED = (
    columns.PROMPT_IDS,
    columns.RESPONSE_IDS,
    columns.RESPONSE_MASK,
    columns.ROLLOUT_LOGPROBS,
    columns.FINISH,
    columns.SCORE,
    columns.VALID,
)
OPTIONAL = (
    columns.OLD_LOGPROBS,
    columns.SUM_PI_SQUARED,
    columns.REF_LOGPROBS,
    columns.VALUES,
    f"{columns.SCORE_PREFIX}*",
)
"""Read where the batch has them; those that the algorithm needs and misses are named in the error."""


@dataclass(frozen=True)
class Rows:
    """A step's rows as tensors, in the order of their keys: sums must not depend on which replica sent what first."""

    block: Block
    mask_BT: Tensor
    """bool, tokens that the policy sampled."""
    scores_B: Tensor
    graded_B: Tensor
    truncated_B: Tensor
    greedy_scores_B: Tensor | None
    """Score of the greedy answer to the row's prompt, NaN where it was not graded; None without such rows."""

    @classmethod
    def of(cls, block: Block, config: RunConfig) -> "Rows":
        """Reads samples and scores; rows with sample index rollout.n and above are the greedy answers (ReMax)."""
        greedy = [key for key in block.rows if key.sample >= config.rollout.n]
        block, baselines = block.select(sorted(set(block.rows) - set(greedy))), block.select(greedy)
        if not block.rows:
            raise ValueError("the batch has no sampled rows: there is nothing to compute advantages of")
        return cls(
            block,
            per_token(block, columns.RESPONSE_MASK),
            scalars(block[columns.SCORE]),
            scalars(block[columns.VALID]).bool(),
            torch.tensor([finish == "length" for finish in block[columns.FINISH].texts()], dtype=torch.bool),
            _greedy_scores(block, baselines) if greedy else None,
        )

    @property
    def valid_B(self) -> Tensor:
        """bool, rows that take part: graded, not empty, and with a baseline where there are baselines."""
        valid_B = self.graded_B & self.mask_BT.any(1)
        return valid_B if self.greedy_scores_B is None else valid_B & self.greedy_scores_B.isfinite()

    def tokens(self, name: str) -> Tensor | None:
        """A per-token column [B, T], None where the batch does not have it."""
        return per_token(self.block, name) if name in self.block else None


@torch.no_grad()
def training_batch(block: Block, config: RunConfig, kl_coef: float) -> tuple[Block, dict[str, float]]:
    """Everything that an update needs, for every row of `block` but the greedy baselines.

    Args:
        block: columns `REQUIRED`, and those of `OPTIONAL` that the algorithm needs.
        config: the run's.
        kl_coef: coefficient of the KL penalty now, for algorithm.kl.placement = reward.

    Returns:
        The training block and metrics. Its `response_mask` marks the tokens that carry loss: none in rows that take
        no part. `valid` says which rows took part in the statistics.

    Raises:
        ValueError: a column that the algorithm needs is missing, or does not fit.
    """
    rows = Rows.of(block, config)
    valid_B = rows.valid_B
    scores_B, loss_B = _shape(rows, valid_B, config)
    active_BT = rows.mask_BT & valid_B[:, None]
    old_BT, rollout_BT = rows.tokens(columns.OLD_LOGPROBS), per_token(rows.block, columns.ROLLOUT_LOGPROBS)
    kl_BT = _reference_kl(rollout_BT if old_BT is None else old_BT, rows, active_BT, config)
    penalty_BT = kl_BT if config.algorithm.kl.placement == "reward" else None
    inputs = AdvantageInputs(
        scores_B=scores_B,
        mask_BT=rows.mask_BT,
        valid_B=valid_B,
        groups_B=_numbers([key.prompt for key in rows.block.rows]),
        samples_B=_samples(rows.block),
        token_rewards_BT=token_rewards(scores_B, penalty_BT, kl_coef, rows.mask_BT),
        values_BT=rows.tokens(columns.VALUES),
        score_parts=_score_parts(rows.block),
        baseline_scores_B=rows.greedy_scores_B,
        old_logprobs_BT=old_BT,
        sum_pi_squared_BT=rows.tokens(columns.SUM_PI_SQUARED),
    )
    estimated = advantage_estimator(config.algorithm.advantage)(inputs, _options(config))
    correction = CorrectionOptions(**config.algorithm.correction.model_dump())
    corrected = correct(old_BT, rollout_BT, active_BT & loss_B[:, None], correction)
    tensors_BT = {
        columns.RESPONSE_MASK: corrected.mask_BT,
        columns.OLD_LOGPROBS: corrected.old_logprobs_BT,
        columns.ADVANTAGES: estimated.advantages_BT,
        columns.RETURNS: estimated.returns_BT,
        columns.LOSS_WEIGHTS: corrected.weights_BT,
    }
    metrics = {f"rollout_{name}": value for name, value in corrected.metrics.items()}
    metrics |= _metrics(rows, valid_B, active_BT, estimated)
    if kl_BT is not None:
        metrics |= {"kl": float(masked_mean(kl_BT, active_BT)), "kl_coef": kl_coef}
    return _training_block(rows, tensors_BT, valid_B), metrics


def _numbers(names: list[str]) -> Tensor:
    """int64 [B]: rows of the same name share a number."""
    return torch.from_numpy(np.unique(names, return_inverse=True)[1])


def _samples(block: Block) -> Tensor | None:
    """int64 [B]: rows of the same sample share a number; None where every row is one."""
    names = [str(key.whole) for key in block.rows]
    return _numbers(names) if len(set(names)) < len(names) else None


def _greedy_scores(block: Block, baselines: Block) -> Tensor:
    """[B]. A greedy answer that was not graded is NaN: a failed grade costs its prompt's rows, not the run."""
    scores_B = torch.where(scalars(baselines[columns.VALID]).bool(), scalars(baselines[columns.SCORE]), torch.nan)
    known = {key.uid: score for key, score in zip(baselines.rows, scores_B.tolist(), strict=True)}
    return torch.tensor([known.get(key.uid, torch.nan) for key in block.rows])


def _shape(rows: Rows, valid_B: Tensor, config: RunConfig) -> tuple[Tensor, Tensor]:
    """Scores after what is done about long and cut answers, and bool [B]: rows that carry loss."""
    scores_B, loss_B = handle_truncated(rows.scores_B, valid_B, rows.truncated_B, config.algorithm.truncated)
    if config.algorithm.overlong_buffer:
        lengths_B = torch.from_numpy(row_lengths(rows.block)[1])
        buffer, penalty = config.algorithm.overlong_buffer, config.algorithm.overlong_penalty
        scores_B = scores_B + overlong_penalty(lengths_B, config.rollout.max_tokens, buffer, penalty)
    return scores_B, loss_B


def _reference_kl(logprobs_BT: Tensor, rows: Rows, active_BT: Tensor, config: RunConfig) -> Tensor | None:
    """KL per token from the policy to the reference, None where the run has no reference."""
    if config.algorithm.kl.placement == "none":
        return None
    reference_BT = per_token(rows.block, columns.REF_LOGPROBS)
    return kl_estimate(logprobs_BT, reference_BT, active_BT, config.algorithm.kl.estimator)


def _score_parts(block: Block) -> dict[str, Tensor]:
    prefix = columns.SCORE_PREFIX
    return {name.removeprefix(prefix): scalars(block[name]) for name in block.columns if name.startswith(prefix)}


def _options(config: RunConfig) -> AdvantageOptions:
    algorithm = config.algorithm
    return AdvantageOptions(
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        normalize_std=algorithm.normalize_std,
        whiten=algorithm.whiten_advantages,
        extra=algorithm.options,
    )


def _training_block(rows: Rows, tensors_BT: dict[str, Tensor | None], valid_B: Tensor) -> Block:
    block, lengths_B = rows.block, row_lengths(rows.block)[1]
    there = {name: tensor_BT for name, tensor_BT in tensors_BT.items() if tensor_BT is not None}
    made = {name: ragged_from_padded(tensor_BT, lengths_B) for name, tensor_BT in there.items()}
    passed_on = (columns.PROMPT_IDS, columns.RESPONSE_IDS, columns.VALUES, columns.REF_LOGPROBS)
    made |= {name: block[name] for name in passed_on if name in block}
    return Block(block.rows, {**made, columns.VALID: ragged_from_scalars(valid_B)})


def _metrics(rows: Rows, valid_B: Tensor, active_BT: Tensor, estimated: Advantages) -> dict[str, float]:
    """Statistics over the rows that take part, and what was left out."""
    lengths_B = torch.from_numpy(row_lengths(rows.block)[1]).double()
    metrics = dict(estimated.metrics) | {
        "rows_invalid": float((~rows.graded_B).sum()),
        "rows_empty": float((~rows.mask_BT.any(1)).sum()),
        "response_length": float(lengths_B.mean()),
        "response_length_max": float(lengths_B.max()),
        "truncated_fraction": float(rows.truncated_B.double().mean()),
    }
    if valid_B.any():
        scores_N, advantages_N = rows.scores_B[valid_B].double(), estimated.advantages_BT[active_BT].double()
        metrics |= {"score_mean": float(scores_N.mean()), "score_std": float(scores_N.std(correction=0))}
        metrics |= {"score_min": float(scores_N.min()), "score_max": float(scores_N.max())}
        metrics["advantage_std"] = float(advantages_N.std(correction=0))
    return metrics
