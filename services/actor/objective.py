"""What the actor's optimizer minimises: policy loss, minus entropy bonus, plus KL to the reference."""

import torch
from torch import Tensor

from shared.algo import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOptions,
    Totals,
    aggregate,
    kl_estimate,
    masked_sum,
    policy_loss,
    select_tokens,
    uniform_noise,
)
from shared.batch import columns
from shared.batch.block import Block
from shared.batch.tensors import ragged_from_padded
from shared.config import RunConfig
from shared.seeds import derive_seed
from shared.training.engine import map_rows
from shared.training.models import Policy
from shared.training.sequences import collate, per_token, row_lengths

SELECTION = "selection"
"""Column of tokens that a loss singles out on the whole mini-batch."""
SELECTING = ("clip_cov", "kl_cov")
"""Losses that do."""


class Objective:
    """The loss of micro-batches for one policy, run and flow step."""

    def __init__(self, policy: Policy, config: RunConfig, device: torch.device, step: int) -> None:
        self._policy, self._config, self._device, self._step = policy, config, device, step
        loss = config.actor.loss
        self._loss = policy_loss(config.algorithm.policy_loss)
        self._extra = dict(POLICY_LOSSES.defaults[config.algorithm.policy_loss]) | loss.options
        self._options = PolicyLossOptions(
            loss.clip_ratio_low, loss.clip_ratio_high, loss.clip_ratio_c, extra=loss.options
        )

    def __call__(self, micro: Block, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        """The micro-batch's share of the mini-batch loss, and its metrics."""
        loss, kl = self._config.actor.loss, self._config.algorithm.kl
        temperature = self._config.rollout.temperature
        scores = self._policy(collate(micro, self._device), temperature, entropy_gradient=loss.entropy_coef != 0)
        mask_BT = self._column(micro, columns.RESPONSE_MASK)
        inputs = PolicyLossInputs(
            logprobs_BT=scores.logprobs_BT,
            old_logprobs_BT=self._column(micro, columns.OLD_LOGPROBS),
            advantages_BT=self._column(micro, columns.ADVANTAGES),
            mask_BT=mask_BT,
            rollout_weights_BT=self._column(micro, columns.LOSS_WEIGHTS) if columns.LOSS_WEIGHTS in micro else None,
            selection_BT=self._column(micro, SELECTION) if SELECTION in micro else None,
        )
        loss_BT, metrics = self._loss(inputs, self._options)
        share = self._sum(loss_BT, mask_BT, totals)
        metrics["policy_loss_sum"] = masked_sum(loss_BT.detach(), mask_BT)
        metrics["entropy_sum"] = masked_sum(scores.entropy_BT.detach(), mask_BT)
        if loss.entropy_coef:
            share = share - loss.entropy_coef * self._sum(scores.entropy_BT, mask_BT, totals)
        if kl.placement == "loss":
            reference_BT = self._column(micro, columns.REF_LOGPROBS)
            kl_BT = kl_estimate(scores.logprobs_BT, reference_BT, mask_BT, kl.estimator)
            share = share + kl.coef * self._sum(kl_BT, mask_BT, totals)
            metrics["kl_loss_sum"] = masked_sum(kl_BT.detach(), mask_BT)
        return share, metrics

    def prepare(self, mini: Block, epoch: int) -> Block:
        """Adds the selection that some losses make on the whole mini-batch, with the policy as it is now."""
        if self._config.algorithm.policy_loss not in SELECTING:
            return mini
        temperature = self._config.rollout.temperature

        def logprobs(micro: Block) -> list[Tensor]:
            return [self._policy(collate(micro, self._device), temperature).logprobs_BT]

        (current,) = map_rows(mini, self._config.actor, logprobs)
        whole = Block(mini.rows, {**mini.columns, "current": current})
        mask_BT = per_token(whole, columns.RESPONSE_MASK)
        seeds = [
            derive_seed(self._config.seed, self._step, key.uid, key.sample, f"selection/{epoch}") for key in mini.rows
        ]
        selection_BT = select_tokens(
            self._config.algorithm.policy_loss,
            per_token(whole, "current"),
            per_token(whole, columns.ADVANTAGES),
            mask_BT,
            uniform_noise(torch.tensor(seeds), mask_BT.shape[1]),
            self._extra,
        )
        assert selection_BT is not None
        return Block(mini.rows, {**mini.columns, SELECTION: ragged_from_padded(selection_BT, row_lengths(mini)[1])})

    def _column(self, micro: Block, name: str) -> Tensor:
        return per_token(micro, name, self._device)

    def _sum(self, values_BT: Tensor, mask_BT: Tensor, totals: Totals) -> Tensor:
        every_B = torch.ones(len(mask_BT), dtype=torch.bool, device=mask_BT.device)
        return aggregate(values_BT, mask_BT, every_B, self._config.actor.loss.aggregation, totals)
