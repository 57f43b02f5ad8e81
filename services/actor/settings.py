"""Settings of the actor service."""

from shared.training.role import ModelSettings


class ActorSettings(ModelSettings):
    """Trains the policy."""

    role: str = "actor"
    weight_versions: int = 2
    """Published weight versions held for rollouts; each costs the model's size in memory."""
