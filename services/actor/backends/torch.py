"""The actor: plain PyTorch on the CPU, one GPU or, as one of several ranks, its part of the model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from services.actor.advantages import training_batch
from services.actor.backend import Metrics
from services.actor.custom import load_custom
from services.actor.objective import SELECTING, Objective
from shared.algo import (
    AdaptiveKL,
    CorrectionOptions,
    FixedKL,
    check_algorithm,
    kl_estimate,
    masked_mean,
    overlong_penalty,
)
from shared.batch import columns
from shared.batch.block import Block, RowKey
from shared.config import KLConfig, RunConfig
from shared.gen.sextet.v1 import weights_pb2
from shared.places import place
from shared.rpc.history import Applied
from shared.rpc.role import Configured, StagedState
from shared.training import checkpoint as checkpoints
from shared.training.budget import sized
from shared.training.device import pick_device
from shared.training.engine import Engine, map_rows
from shared.training.export import describe, export, shards_of
from shared.training.group import ALONE, Group
from shared.training.lora import is_adapter
from shared.training.models import Policy, load_tokenizer
from shared.training.parallel import plan_parallel
from shared.training.parking import Parking
from shared.training.role import RunHolder, compute, operation_fields
from shared.training.saving import StateCopy
from shared.training.sequences import collate, per_token, token_mean, trainable
from shared.training.sharding import load_policy
from shared.weights.channel import Publisher

ROLE = "actor"


@dataclass
class Training:
    """One run's policy in training."""

    config: RunConfig
    engine: Engine[Policy]
    tokenizer: PreTrainedTokenizerBase
    kl: FixedKL | AdaptiveKL
    parking: Parking
    last_applied: dict[str, Any] | None = None
    copy: StateCopy = field(default_factory=lambda: StateCopy(ROLE))


class TorchActor:
    """See services/actor/backend.py.

    Args:
        publisher: makes weights fetchable.
        last_applied: the last operation that changed state, kept in checkpoints.
        group: the ranks of this replica.
    """

    def __init__(self, publisher: Publisher, last_applied: Callable[[], Applied | None], group: Group = ALONE) -> None:
        self._publisher, self._last_applied, self._group = publisher, last_applied, group
        self._training: RunHolder[Training] = RunHolder()

    async def configure(self, config: RunConfig, run: str, checkpoint: str | None) -> Configured:
        self._training.drop()
        training = await compute(_load, config, checkpoint, self._group)
        facts = await compute(describe, training.engine.model, training.engine.parallel)
        if config.actor.park:
            await compute(training.parking.park)
        self._training.hold(run, training)
        return Configured(training.engine.optimizer.steps, facts, training.last_applied)

    async def stage(self) -> StagedState:
        training = self._training.any()
        state = {
            "kl_coef": training.kl.coef,
            "seed": training.config.seed,
            "last_applied": operation_fields(self._last_applied()),
        }
        engine = training.engine
        return await compute(training.copy.take, engine.model, engine.optimizer, state, engine.parallel)

    async def release(self, run: str) -> None:
        self._publisher.release(run)
        if self._training.holds(run):
            self._training.drop()

    def version(self) -> int:
        training = self._training.current
        return -1 if training is None else training.engine.optimizer.steps

    def fault(self) -> str:
        return self._training.fault

    def my_rows(self, run: str, step: int | None, outline: Block) -> list[RowKey]:
        engine = self._training.of(run).engine
        return engine.my_rows(outline, step)

    async def logprobs(self, run: str, block: Block, outline: Block | None = None) -> tuple[Block, Metrics]:
        return await compute(_logprobs, self._training.of(run), block, outline)

    async def advantages(self, run: str, block: Block) -> tuple[Block, Metrics]:
        training = self._training.of(run)
        return await compute(training_batch, block, training.config, training.kl.coef)

    async def update(self, run: str, step: int, block: Block, outline: Block | None = None) -> tuple[int, Metrics]:
        with self._training.changing(run) as training:
            metrics = await compute(_update, training, step, block, outline)
        return training.engine.optimizer.steps, metrics

    async def publish(self, run: str) -> weights_pb2.WeightsRef:
        training = self._training.of(run)
        engine, options = training.engine, training.config.weights

        def publish() -> weights_pb2.WeightsRef:
            training.parking.fetch()
            tensors, dtype = shards_of(engine.model), engine.model.dtype
            exact = frozenset(filter(is_adapter, tensors))
            steps = engine.optimizer.steps
            try:
                return self._publisher.publish(steps, tensors, run=run, options=options, dtype=dtype, exact=exact)
            finally:
                if training.config.actor.park:
                    training.parking.park()

        return await compute(publish)

    async def export(self, run: str, directory: Path) -> None:
        training = self._training.of(run)
        engine = training.engine
        await compute(export, engine.model, training.tokenizer, directory, engine.parallel)


def _check(config: RunConfig) -> None:
    """Refuses, before anything is loaded, what would only fail in the first step."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    check_algorithm(
        algorithm.advantage,
        algorithm.policy_loss,
        config.rollout.n,
        kl.placement == "reward",
        algorithm.options,
        config.actor.loss.options,
        score_shaping=algorithm.overlong_buffer > 0 or algorithm.truncated == "zero",
    )
    CorrectionOptions(**algorithm.correction.model_dump())
    kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), kl.estimator)
    if algorithm.overlong_buffer:
        overlong_penalty(torch.zeros(1), config.rollout.max_tokens, algorithm.overlong_buffer)
    if kl.target is not None and (kl.target <= 0 or kl.placement != "reward"):
        raise ValueError(f"algorithm.kl.target={kl.target} needs to be > 0, with algorithm.kl.placement=reward")


def _load(config: RunConfig, checkpoint: str | None, group: Group) -> Training:
    config = load_custom(config)
    _check(config)
    if config.checkpoint.directory:
        # Refused here, and not at the first checkpoint.
        place(config.checkpoint.directory)
    if group.size > 1 and config.algorithm.policy_loss in SELECTING:
        raise ValueError(
            f"algorithm.policy_loss={config.algorithm.policy_loss} needs whole mini-batches: one rank only"
        )
    if config.actor.park and (group.size > 1 or pick_device(config.model.device).type == "cpu"):
        raise ValueError("actor.park needs one rank on a GPU; several ranks have actor.parallel.offload")
    kl, parallel = config.algorithm.kl, plan_parallel(config.actor.parallel, group, "actor.parallel")
    policy = load_policy(config.model, config.actor, parallel, seed=config.seed)
    config = config.model_copy(update={"actor": sized(config.actor, config, policy, parallel)})
    length = config.rollout.max_tokens
    engine = Engine(policy, config.actor, seed=config.seed, norm_length=length, parallel=parallel)
    parking = Parking(policy, engine.optimizer)
    training = Training(config, engine, load_tokenizer(config.model), _kl_controller(kl), parking)
    if checkpoint:
        state = checkpoints.load(place(checkpoint), policy, engine.optimizer, role=ROLE, parallel=parallel)
        training.kl = _kl_controller(kl.model_copy(update={"coef": state["kl_coef"]}))
        training.last_applied = state.get("last_applied")
    return training


def _kl_controller(config: KLConfig) -> FixedKL | AdaptiveKL:
    if config.target is None:
        return FixedKL(config.coef)
    return AdaptiveKL(config.coef, config.target, config.horizon)


def _logprobs(training: Training, block: Block, outline: Block | None) -> tuple[Block, Metrics]:
    training.parking.fetch()
    engine, temperature = training.engine, training.config.rollout.temperature

    def scores(micro: Block) -> list[Tensor]:
        scores = engine.model(collate(micro, engine.device), temperature)
        return [scores.logprobs_BT, scores.entropy_BT, scores.sum_pi_squared_BT]

    names = (columns.OLD_LOGPROBS, columns.ENTROPY, columns.SUM_PI_SQUARED)
    made = map_rows(block, training.config.actor, scores, engine.parallel, outline, engine.model)
    whole = block if outline is None else outline
    result = Block(whole.rows, dict(zip(names, made, strict=True)))
    means = {name: token_mean(whole, column) for name, column in list(result.columns.items())[:2]}
    return result, means


def _update(training: Training, step: int, block: Block, outline: Block | None) -> Metrics:
    whole = block if outline is None else outline
    if not (trained := trainable(whole)):
        return {"rows": 0.0, "optimizer_steps": 0.0}
    training.parking.fetch()
    engine = training.engine
    objective = Objective(engine.model, training.config, engine.device, step)
    if outline is None:
        metrics = engine.update(block.select(trained), objective, step=step, prepare=objective.prepare)
    else:
        metrics = engine.update(block, objective, step=step, outline=outline.select(trained))
    # Here and not with the advantages: only an applied update may move the coefficient, and only once.
    if isinstance(training.kl, AdaptiveKL) and engine.parallel.group.rank == 0:
        training.kl = training.kl.update(_mean_kl(whole, training.config), len(trained))
        metrics["kl_coef"] = training.kl.coef
    return metrics


def _mean_kl(block: Block, config: RunConfig) -> float:
    """KL to the reference per trained token, as the step began."""
    mask_BT = per_token(block, columns.RESPONSE_MASK)
    logprobs_BT, reference_BT = (per_token(block, name) for name in (columns.OLD_LOGPROBS, columns.REF_LOGPROBS))
    return float(masked_mean(kl_estimate(logprobs_BT, reference_BT, mask_BT, config.algorithm.kl.estimator), mask_BT))
