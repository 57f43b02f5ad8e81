"""The reward role's state: the backend of the configured run."""

import time
from collections import Counter
from collections.abc import Callable

import structlog
from prometheus_client import Counter as Metric

from services.reward.backend import Grade, Item, RewardBackend
from services.reward.scoring import block_of, items_of, metrics_of
from shared.batch.block import Block
from shared.config import RunConfig
from shared.rpc.errors import FailedPrecondition, Unimplemented
from shared.rpc.role import Configured, StagedState

MAX_LOGGED = 5

GRADES = Metric("sextet_reward_grades_total", "Responses graded.", ["outcome"])

log = structlog.get_logger()


class RewardRole:
    """Opens the backend that a run names and grades blocks with it.

    Args:
        open_backend: makes the backend for `reward.backend`, not yet opened.
        endpoint: an external grader that takes the place of what the run names; empty: none.
    """

    def __init__(self, open_backend: Callable[[RunConfig], RewardBackend], endpoint: str = "") -> None:
        self._open_backend = open_backend
        self._endpoint = endpoint
        self._backend: RewardBackend | None = None
        self._run = ""
        self._culprit = ""

    async def configure(self, config: RunConfig, run: str, checkpoint: str | None) -> Configured:
        await self.release(self._run)
        config = _graded_by(config, self._endpoint)
        backend = self._open_backend(config)
        facts = await backend.open(config)
        self._backend, self._run, self._culprit = backend, run, _culprit(config)
        return Configured(version=0, facts={"backend": config.reward.backend, **facts})

    async def stage(self) -> StagedState:
        raise Unimplemented("the reward role has no state to save")

    async def release(self, run: str) -> None:
        if run == self._run and self._backend is not None:
            backend, self._backend, self._run = self._backend, None, ""
            await backend.close()

    def version(self) -> int:
        return -1 if self._backend is None else 0

    def fault(self) -> str:
        return ""

    async def grade(self, run: str, block: Block) -> tuple[Block, dict[str, float]]:
        """Columns for the rows of a block with text columns, and metrics.

        Raises:
            FailedPrecondition: the run is not configured here, or not one row could be graded: that is a broken
                grader, not a broken sample.
        """
        if self._backend is None or run != self._run:
            raise FailedPrecondition(f"this reward service is configured for run {self._run!r}, not {run!r}", run=run)
        items, start = items_of(block), time.monotonic()
        grades = await self._backend.score(run, items)
        self._report(items, grades)
        return block_of(block.rows, grades), metrics_of(items, grades, time.monotonic() - start)

    def _report(self, items: list[Item], grades: list[Grade]) -> None:
        for outcome, count in Counter(grade.kind or "valid" for grade in grades).items():
            GRADES.labels(outcome).inc(count)
        bad = [(item, grade) for item, grade in zip(items, grades, strict=True) if not grade.valid]
        for item, grade in bad[:MAX_LOGGED]:
            log.warning("not graded", uid=item.uid, sample=item.sample, kind=grade.kind, error=grade.error)
        if bad and len(bad) == len(items):
            error = bad[0][1].error
            raise FailedPrecondition(f"{self._culprit} graded none of {len(items)} responses: {error}", error=error)


def _graded_by(config: RunConfig, endpoint: str) -> RunConfig:
    if not endpoint:
        return config
    backend = "http" if endpoint.startswith(("http://", "https://")) else "grpc"
    reward = config.reward.model_copy(update={"backend": backend, "endpoint": endpoint})
    return config.model_copy(update={"reward": reward})


def _culprit(config: RunConfig) -> str:
    reward = config.reward
    if reward.backend == "model":
        return f"reward.model.path={reward.model.path!r}" if reward.model else "reward.model"
    if reward.backend == "agents":
        return "reward.backend='agents'"
    key = "function" if reward.backend == "function" else "endpoint"
    return f"reward.{key}={getattr(reward, key)!r}"
