"""Sampling in rounds: the stock grows until a batch is complete, and what is not goes on in a later step."""

import time
from collections.abc import Sequence
from typing import Any

from services.controller.calls import Result
from services.controller.dispatch import Dispatcher
from services.controller.stock import Stock, Waiting
from services.controller.verbs import GENERATE, HOLD
from shared.config import RunConfig


class Growth:
    """What a step does with the stock.

    Args:
        stock: changed by what is done.
    """

    def __init__(self, dispatcher: Dispatcher, stock: Stock, config: RunConfig) -> None:
        self._dispatcher, self.stock, self._config = dispatcher, stock, config

    def room(self, steps: int) -> int:
        """Prompts that may be drawn now: those in flight are at most what `staleness` and the steps left allow."""
        wanted = self._config.data.batch_size * min(1 + self._config.algorithm.staleness, steps)
        return max(0, wanted - len(self.stock.waiting))

    def after_update(self, version: int) -> dict[str, Any]:
        """The stock as the journal keeps it, with the policy's version at the end of the step."""
        self.stock.updated(version, keep=self._config.algorithm.staleness + 2)
        return self.stock.encode()

    @property
    def batch(self) -> int:
        """Prompts that a step trains on."""
        return min(self._config.data.batch_size, len(self.stock.waiting))

    async def fill(self) -> Result | None:
        """Samples as many prompts to their end as a batch is short of, those first that were drawn first."""
        limit = self._config.algorithm.staleness
        anew = self.stock.begin_anew(limit)
        short = self.batch - len(self.stock.complete())
        if short <= 0:
            return None
        return self._rounds([await self._round(self.stock.unfinished()[:short], 0, limit)], anew)

    async def grow(self, ahead: bool) -> Result:
        """Samples until a batch is complete, and whatever could not be trained any more if it were to wait.

        Args:
            ahead: the batch is trained in the next step, after one update more.
        """
        limit = self._config.algorithm.staleness - ahead
        anew, results = self.stock.begin_anew(limit), []
        while unfinished := self.stock.unfinished():
            pressing = sum(self.stock.age(each) >= limit for each in unfinished)
            if not pressing and len(self.stock.complete()) >= self.batch:
                break
            budget = 0 if pressing == len(unfinished) else self._config.rollout.budget
            results.append(await self._round(unfinished, budget, limit))
        return self._rounds(results, anew)

    def take(self) -> Result:
        """The batch, out of the stock."""
        rows, ages = self.stock.take_out(self.batch)
        mean = sum(ages) / len(ages) if ages else 0.0
        return Result(
            "rollout.ready", rows, {"staleness_mean": mean, "staleness_max": max(ages, default=0), "rows": len(ages)}
        )

    async def hold(self) -> None:
        """Moves the stock's rows to the actor, whose life is the run's, into a block of this step."""
        if self.stock.rows.blocks:
            held = await self._dispatcher.perform(HOLD, self.stock.rows)
            assert held.ref is not None
            self.stock.rows = held.ref

    async def _round(self, waiting: Sequence[Waiting], budget: int, limit: int) -> Result:
        started = time.monotonic()
        prompts = [each.unfinished() for each in waiting]
        result, rows = await self._dispatcher.go_on(prompts, self.stock.rows, budget, self.stock.since(limit))
        assert result.ref is not None
        self.stock.take_in(result.ref, rows)
        return Result(result.call, result.ref, result.metrics, began=started, seconds=time.monotonic() - started)

    def _rounds(self, results: Sequence[Result], anew: int) -> Result:
        """Several rounds as one call: what is a count adds up, means would mix tokens that are counted again."""
        seconds = sum(result.seconds for result in results)
        tokens = sum(result.metrics.get("response_tokens", 0.0) for result in results)
        metrics = {
            "rounds": len(results),
            "response_tokens": tokens,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "begun_anew": anew,
            "prompts_waiting": len(self.stock.waiting),
            "prompts_unfinished": len(self.stock.unfinished()),
        }
        return Result(GENERATE.name, metrics=metrics)
