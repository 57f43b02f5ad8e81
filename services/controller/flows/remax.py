"""ReMax: the greedy answer's score is the baseline."""

from services.controller.calls import Handle
from services.controller.flows.base import DataFlow, refuse
from services.controller.prompts import Prompt
from shared.config import RunConfig


class ReMax(DataFlow):
    """One ReMax step (Li et al. 2023). The greedy row of a prompt comes from the same call as its samples."""

    @classmethod
    def check(cls, config: RunConfig) -> None:
        name = config.algorithm.advantage
        refuse(name != "remax", f"flow: remax needs algorithm.advantage=remax (got {name!r})")
        refuse(config.rollout.agents, "flow: remax wants a greedy answer beside the others: set rollout.agents=false")
        refuse(config.rollout.budget > 0, "flow: remax compares answers of one policy: set rollout.budget=0")

    def forward(self, prompts: list[Prompt]) -> Handle:
        samples = self.rollout.generate(prompts, baseline=True)
        scores = self.reward.score(samples)
        reference = self.reference.logprobs(samples) if self.uses_reference else None
        old = self.actor.logprobs(samples)
        batch = self.actor.advantages(samples, scores, reference, old)
        actor = self.actor.update(batch)
        self.sync_weights(after=actor)
        return self.metrics(samples, scores, batch, actor)
