"""Who makes and removes replicas."""

from typing import Protocol


class Scaler(Protocol):
    """Brings the number of replicas of a role to what is wanted."""

    async def scale(self, role: str, replicas: int) -> tuple[int, int]:
        """Starts or stops replicas; returns how many there were, and how many are wanted now.

        Raises:
            SextetError: what manages them refuses, or can't be reached; says what to change.
        """
        ...

    async def close(self) -> None:
        """Ends what it manages, where that is this process's own."""
        ...
