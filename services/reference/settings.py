"""Settings of the reference service."""

from shared.training.role import ModelSettings


class ReferenceSettings(ModelSettings):
    """Scores samples with the frozen policy."""

    role: str = "reference"
