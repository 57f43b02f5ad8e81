"""A flow of your own: name it in the run's configuration and start the run as any other.

    flow: examples/custom_flow.py:HardPrompts
    algorithm: {advantage: rloo, whiten_advantages: false}
    options: {easy: 0.8}

It trains only on prompts that the policy does not master yet, and tells how many those are. What it shows: `forward`
may be `async def` and look at results; `keep` chooses rows; numbers of its own join the step's; there is no update when
there is nothing to learn from.
"""

import math
from collections import defaultdict

from services.controller.calls import Handle, Result
from services.controller.flows.base import DataFlow, refuse
from services.controller.prompts import Prompt
from shared.batch.refs import row_keys
from shared.config import RunConfig


class HardPrompts(DataFlow):
    """GRPO-like step on prompts whose mean score is below `options.easy`."""

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Called when the run is created: a wrong configuration never starts."""
        easy = config.options.get("easy", 1.0)
        refuse(not isinstance(easy, int | float), f"options.easy={easy!r} is not a number")

    async def forward(self, prompts: list[Prompt]) -> Handle:
        samples = self.rollout.generate(prompts)
        scores = self.reward.score(samples)
        hard = below(self.config.options.get("easy", 1.0), await scores)
        counted = self.report("hard_prompts", drawn=len(prompts), kept=len(hard))
        if not hard:
            return self.metrics(samples, scores, counted)
        samples, scores = self.keep(samples, hard), self.keep(scores, hard)
        reference = self.reference.logprobs(samples) if self.uses_reference else None
        batch = self.actor.advantages(samples, scores, reference, self.actor.logprobs(samples))
        actor = self.actor.update(batch)
        self.sync_weights(after=actor)
        return self.metrics(samples, scores, counted, batch, actor)


def below(easy: float, scored: Result) -> list[str]:
    """Uids of prompts whose graded answers have a mean score below `easy`."""
    assert scored.ref is not None
    scores: dict[str, list[float]] = defaultdict(list)
    for key, score in zip(row_keys(scored.ref), scored.scores, strict=True):
        if not math.isnan(score):
            scores[key.uid].append(score)
    return [uid for uid, graded in scores.items() if sum(graded) / len(graded) < easy]
