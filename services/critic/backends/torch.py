"""The critic: plain PyTorch on the CPU, one GPU or, as one of several ranks, its part of the model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from services.critic.backend import Metrics
from shared.algo import Totals, aggregate, value_loss
from shared.batch import columns
from shared.batch.block import Block, RowKey
from shared.config import RunConfig
from shared.places import place
from shared.rpc.history import Applied
from shared.rpc.role import Configured, StagedState
from shared.training import checkpoint as checkpoints
from shared.training.budget import sized
from shared.training.engine import Engine, map_rows
from shared.training.export import describe
from shared.training.group import ALONE, Group
from shared.training.models import ValueModel
from shared.training.parallel import plan_parallel
from shared.training.role import RunHolder, compute, operation_fields
from shared.training.saving import StateCopy
from shared.training.sequences import collate, per_token, token_mean, trainable
from shared.training.sharding import load_value_model

ROLE = "critic"


@dataclass
class Training:
    """One run's value model in training."""

    config: RunConfig
    engine: Engine[ValueModel]
    last_applied: dict[str, Any] | None = None
    copy: StateCopy = field(default_factory=lambda: StateCopy(ROLE))


class TorchCritic:
    """See services/critic/backend.py.

    Args:
        last_applied: the last operation that changed state, kept in checkpoints.
        group: the ranks of this replica.
    """

    def __init__(self, last_applied: Callable[[], Applied | None], group: Group = ALONE) -> None:
        self._last_applied, self._group = last_applied, group
        self._training: RunHolder[Training] = RunHolder()

    async def configure(self, config: RunConfig, run: str, checkpoint: str | None) -> Configured:
        self._training.drop()
        training = await compute(_load, config, checkpoint, self._group)
        self._training.hold(run, training)
        facts = await compute(describe, training.engine.model, training.engine.parallel)
        return Configured(training.engine.optimizer.steps, facts, training.last_applied)

    async def stage(self) -> StagedState:
        training = self._training.any()
        engine, applied = training.engine, operation_fields(self._last_applied())
        state = {"seed": training.config.seed, "last_applied": applied}
        return await compute(training.copy.take, engine.model, engine.optimizer, state, engine.parallel)

    async def release(self, run: str) -> None:
        if self._training.holds(run):
            self._training.drop()

    def version(self) -> int:
        training = self._training.current
        return -1 if training is None else training.engine.optimizer.steps

    def fault(self) -> str:
        return self._training.fault

    def my_rows(self, run: str, step: int | None, outline: Block) -> list[RowKey]:
        return self._training.of(run).engine.my_rows(outline, step)

    async def values(self, run: str, block: Block, outline: Block | None = None) -> tuple[Block, Metrics]:
        return await compute(_values, self._training.of(run), block, outline)

    async def update(self, run: str, step: int, block: Block, outline: Block | None = None) -> tuple[int, Metrics]:
        with self._training.changing(run) as training:
            metrics = await compute(_update, training, step, block, outline)
        return training.engine.optimizer.steps, metrics


def _load(config: RunConfig, checkpoint: str | None, group: Group) -> Training:
    if config.checkpoint.directory:
        # Refused here, and not at the first checkpoint.
        place(config.checkpoint.directory)
    model_config, key = (config.critic.model, "critic.model") if config.critic.model else (config.model, "model")
    parallel = plan_parallel(config.critic.parallel, group, "critic.parallel")
    model = load_value_model(model_config, config.critic, parallel, seed=config.seed, key=key)
    config = config.model_copy(update={"critic": sized(config.critic, config, model, parallel)})
    length = config.rollout.max_tokens
    engine = Engine(model, config.critic, seed=config.seed, norm_length=length, parallel=parallel)
    if checkpoint:
        state = checkpoints.load(place(checkpoint), model, engine.optimizer, role=ROLE, parallel=parallel)
        return Training(config, engine, state.get("last_applied"))
    return Training(config, engine)


def _values(training: Training, block: Block, outline: Block | None) -> tuple[Block, Metrics]:
    engine = training.engine

    def values(micro: Block) -> list[Tensor]:
        return [engine.model(collate(micro, engine.device))]

    (column,) = map_rows(block, training.config.critic, values, engine.parallel, outline, engine.model)
    whole = block if outline is None else outline
    return Block(whole.rows, {columns.VALUES: column}), {"value": token_mean(whole, column)}


def _update(training: Training, step: int, block: Block, outline: Block | None) -> Metrics:
    whole = block if outline is None else outline
    if not (trained := trainable(whole)):
        return {"rows": 0.0, "optimizer_steps": 0.0}
    engine, clip = training.engine, training.config.critic.clip_range_value

    def loss(micro: Block, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        names = (columns.VALUES, columns.RETURNS, columns.RESPONSE_MASK)
        old_BT, returns_BT, mask_BT = (per_token(micro, name, engine.device) for name in names)
        values_BT = engine.model(collate(micro, engine.device))
        loss_BT, metrics = value_loss(values_BT, old_BT, returns_BT, mask_BT, clip)
        every_B = torch.ones(len(micro), dtype=torch.bool, device=engine.device)
        return aggregate(loss_BT, mask_BT, every_B, "token-mean", totals), metrics

    if outline is None:
        metrics = engine.update(block.select(trained), loss, step=step)
    else:
        metrics = engine.update(block, loss, step=step, outline=outline.select(trained))
    return metrics | ({"explained_variance": explained_variance(whole)} if engine.parallel.group.rank == 0 else {})


def explained_variance(block: Block) -> float:
    """1 - Var(returns - values) / Var(returns) over trained tokens: of the values the returns were made with.

    1 is perfect, 0 no better than a constant; 0 as well where all returns are equal.
    """
    mask_BT = per_token(block, columns.RESPONSE_MASK)
    returns_N, values_N = (per_token(block, name)[mask_BT].double() for name in (columns.RETURNS, columns.VALUES))
    spread = float(returns_N.var(correction=0))
    return 1 - float((returns_N - values_N).var(correction=0)) / spread if spread > 0 else 0.0
