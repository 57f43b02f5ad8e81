"""The reference: plain PyTorch on the CPU, one GPU or as one of several ranks, computed as the actor computes."""

from dataclasses import dataclass

from torch import Tensor

from services.reference.backend import Metrics
from shared.batch import columns
from shared.batch.block import Block, RowKey
from shared.config import RunConfig
from shared.rpc.errors import Unimplemented
from shared.rpc.role import Configured, StagedState
from shared.training.budget import sized
from shared.training.engine import map_rows, my_shares
from shared.training.export import describe
from shared.training.group import ALONE, Group
from shared.training.microbatch import rows_of
from shared.training.models import Policy
from shared.training.parallel import Parallel, plan_parallel
from shared.training.role import RunHolder, compute
from shared.training.sequences import collate, token_mean
from shared.training.sharding import device_of, lay_out, load_policy


@dataclass(frozen=True)
class Frozen:
    """One run's reference."""

    config: RunConfig
    policy: Policy
    parallel: Parallel


class TorchReference:
    """See services/reference/backend.py."""

    def __init__(self, group: Group = ALONE) -> None:
        self._group = group
        self._frozen: RunHolder[Frozen] = RunHolder()

    async def configure(self, config: RunConfig, run: str, checkpoint: str | None) -> Configured:
        self._frozen.drop()
        frozen = await compute(_load, config, self._group)
        self._frozen.hold(run, frozen)
        return Configured(0, await compute(describe, frozen.policy, frozen.parallel))

    async def stage(self) -> StagedState:
        raise Unimplemented("the reference never changes: there is no state to save")

    async def release(self, run: str) -> None:
        if self._frozen.holds(run):
            self._frozen.drop()

    def version(self) -> int:
        return -1 if self._frozen.current is None else 0

    def fault(self) -> str:
        return ""

    def my_rows(self, run: str, outline: Block) -> list[RowKey]:
        frozen = self._frozen.of(run)
        return rows_of(my_shares(outline, frozen.config.actor, frozen.parallel))

    async def logprobs(self, run: str, block: Block, outline: Block | None = None) -> tuple[Block, Metrics]:
        return await compute(_logprobs, self._frozen.of(run), block, outline)


def _load(config: RunConfig, group: Group) -> Frozen:
    model, key = (config.reference_model, "reference_model") if config.reference_model else (config.model, "model")
    parallel = plan_parallel(config.reference_parallel, group, "reference_parallel")
    policy = load_policy(model, None, parallel, key=key)
    lay_out(policy, config.actor, parallel, key)
    policy.requires_grad_(False)
    config = config.model_copy(update={"actor": sized(config.actor, config, policy, parallel)})
    return Frozen(config, policy, parallel)


def _logprobs(frozen: Frozen, block: Block, outline: Block | None) -> tuple[Block, Metrics]:
    device = device_of(frozen.policy, frozen.parallel)

    def logprobs(micro: Block) -> list[Tensor]:
        return [frozen.policy(collate(micro, device), frozen.config.rollout.temperature).logprobs_BT]

    (column,) = map_rows(block, frozen.config.actor, logprobs, frozen.parallel, outline, frozen.policy)
    whole = block if outline is None else outline
    return Block(whole.rows, {columns.REF_LOGPROBS: column}), {"ref_logprobs": token_mean(whole, column)}
