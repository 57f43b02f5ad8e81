"""Group-relative and other critic-free policy gradients."""

from services.controller.calls import Handle
from services.controller.flows.base import DataFlow, refuse
from services.controller.prompts import Prompt
from shared.config import RunConfig

CRITIC = ("gae",)
BASELINE_ROWS = ("remax",)


class GRPO(DataFlow):
    """One step of GRPO (Shao et al. 2024), or of any estimator that needs no critic (`algorithm.advantage`)."""

    @classmethod
    def check(cls, config: RunConfig) -> None:
        name = config.algorithm.advantage
        refuse(name in CRITIC, f"algorithm.advantage={name!r} needs a critic: use flow: ppo, or advantage=grpo")
        refuse(name in BASELINE_ROWS, f"algorithm.advantage={name!r} needs greedy baseline rows: use flow: {name}")

    def forward(self, prompts: list[Prompt]) -> Handle:
        samples = self.rollout.generate(prompts)
        scores = self.reward.score(samples)
        reference = self.reference.logprobs(samples) if self.uses_reference else None
        old = self.actor.logprobs(samples)
        batch = self.actor.advantages(samples, scores, reference, old)
        actor = self.actor.update(batch)
        self.sync_weights(after=actor)
        return self.metrics(samples, scores, batch, actor)
