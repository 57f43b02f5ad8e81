"""Refuses an algorithm that could not work, before a run starts."""

from collections.abc import Mapping

from .advantages import ADVANTAGES, GROUPED_ADVANTAGES
from .policy_losses import POLICY_LOSSES


def check_algorithm(
    advantage: str,
    policy_loss: str,
    samples_per_prompt: int,
    kl_in_reward: bool = False,
    advantage_extra: Mapping[str, float] | None = None,
    loss_extra: Mapping[str, float] | None = None,
    score_shaping: bool = False,
) -> None:
    """Checks names, options and what they need. Call it after the user's own estimators and losses are registered.

    Args:
        advantage: `algorithm.advantage`.
        policy_loss: `algorithm.policy_loss`.
        samples_per_prompt: `rollout.n`.
        kl_in_reward: a KL penalty is part of the token rewards.
        advantage_extra: `algorithm.options`.
        loss_extra: `actor.loss.options`.
        score_shaping: the score is changed after grading (overlong penalty, truncated answers set to 0).

    Raises:
        ValueError: unknown name or option (with the nearest one), group statistics with one sample per prompt, or
            something in the reward that the estimator would not see.
    """
    ADVANTAGES.check(advantage, advantage_extra or {})
    POLICY_LOSSES.check(policy_loss, loss_extra or {})
    if advantage in GROUPED_ADVANTAGES and samples_per_prompt < 2:
        raise ValueError(
            f"algorithm.advantage={advantage!r} compares the answers to one prompt but rollout.n is "
            f"{samples_per_prompt}: set rollout.n >= 2, or use gae, reinforce_plus_plus or remax"
        )
    if advantage == "gdpo" and kl_in_reward:
        raise ValueError("algorithm.advantage='gdpo' does not see a KL penalty in the reward: set kl.placement=loss")
    if advantage == "gdpo" and score_shaping:
        raise ValueError(
            "algorithm.advantage='gdpo' reads named scores as graded: set overlong_buffer=0 and truncated=keep, or "
            "return the penalty as a score of its own"
        )
