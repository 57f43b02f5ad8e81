"""PPO that samples the next step's batch while it trains on this one's."""

from services.controller.calls import Handle
from services.controller.flows.base import DataFlow, refuse
from services.controller.prompts import Prompt
from shared.config import RunConfig


class AsyncPPO(DataFlow):
    """One step of PPO on samples of the policy before the last update, or of `algorithm.staleness` updates ago.

    Trains a critic where `algorithm.advantage` is gae, and is asynchronous GRPO and the like where it is not. Rollout
    correction makes up for the samples' age (decoupled PPO, Hilton et al. 2022; AReaL, Fu et al. 2025). New weights
    reach the rollouts when both the update and the sampling are done.
    """

    @classmethod
    def roles(cls, config: RunConfig) -> frozenset[str]:
        return super().roles(config) | ({"critic"} if cls._learns_values(config) else frozenset())

    @classmethod
    def check(cls, config: RunConfig) -> None:
        refuse(
            config.algorithm.staleness < 1,
            "flow: async_ppo trains on samples of an older policy: set algorithm.staleness to 1 or more, or flow: ppo",
        )
        refuse(
            config.rollout.pieces > 1,
            f"flow: async_ppo has its samples when a step begins: rollout.pieces={config.rollout.pieces} must be 1",
        )
        refuse(
            config.algorithm.advantage == "remax", "flow: async_ppo has no greedy answers: for remax use flow: remax"
        )

    @classmethod
    def carries(cls, config: RunConfig) -> bool:
        return True

    def forward(self, prompts: list[Prompt]) -> Handle:
        samples = self.rollout.ready(prompts)
        ahead = self.rollout.ahead(after=samples)
        scores = self.reward.score(samples)
        reference = self.reference.logprobs(samples) if self.uses_reference else None
        values = self.critic.values(samples) if self._learns_values(self.config) else None
        old = self.actor.logprobs(samples)
        batch = self.actor.advantages(samples, scores, reference, values, old)
        critic = self.critic.update(batch) if values else None
        actor = self.actor.update(batch, after=self.warmup(critic) if critic else None)
        self.sync_weights(after=(actor, ahead))
        return self.metrics(samples, ahead, self.overlap(ahead, actor), scores, batch, critic, actor)

    @staticmethod
    def _learns_values(config: RunConfig) -> bool:
        return config.algorithm.advantage == "gae"
