"""Settings of the critic service."""

from shared.training.role import ModelSettings


class CriticSettings(ModelSettings):
    """Trains the value model."""

    role: str = "critic"
