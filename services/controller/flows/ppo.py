"""Proximal policy optimisation with a learned critic."""

from services.controller.calls import Handle
from services.controller.flows.base import DataFlow, refuse
from services.controller.prompts import Prompt
from shared.config import RunConfig


class PPO(DataFlow):
    """One PPO step (Schulman et al. 2017). Scores, reference, values and old log-probs are made at the same time."""

    needs = frozenset({"rollout", "reward", "critic", "actor"})

    @classmethod
    def check(cls, config: RunConfig) -> None:
        refuse(
            config.algorithm.advantage != "gae",
            f"flow: ppo trains a critic for algorithm.advantage=gae; for {config.algorithm.advantage!r} use flow: grpo",
        )

    def forward(self, prompts: list[Prompt]) -> Handle:
        samples = self.rollout.generate(prompts)
        scores = self.reward.score(samples)
        reference = self.reference.logprobs(samples) if self.uses_reference else None
        values = self.critic.values(samples)
        old = self.actor.logprobs(samples)
        batch = self.actor.advantages(samples, scores, reference, values, old)
        critic = self.critic.update(batch)
        actor = self.actor.update(batch, after=self.warmup(critic))
        self.sync_weights(after=actor)
        return self.metrics(samples, scores, batch, critic, actor)
