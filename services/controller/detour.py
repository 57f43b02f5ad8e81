"""Which rollouts take weights by gRPC for a while: a wire that has failed is not waited for at every sync."""

import time
from dataclasses import dataclass

FIRST_SECONDS, LONGEST_SECONDS = 60.0, 1800.0
"""Between a failure and the next attempt: twice as long after each that fails, too."""


@dataclass(frozen=True)
class Detour:
    """What is known of a wire between an actor and a rollout that has failed.

    Attributes:
        maker: host:port of the actor; another one has not failed yet.
        cause: of the last failure.
        failures: in a row.
        until: time.monotonic() from which the wire is tried again.
    """

    maker: str
    cause: str
    failures: int
    until: float

    def holds(self, maker: str) -> bool:
        """Whether weights of this maker go by gRPC now."""
        return maker == self.maker and time.monotonic() < self.until

    def describe(self) -> str:
        """For people."""
        left = max(0.0, self.until - time.monotonic())
        again = f"tried again in {left:.0f} s" if left else "tried again at the next sync"
        return f"weights come by gRPC, as the wire failed ({self.failures} in a row; {again}): {self.cause}"


def after_failure(before: Detour | None, maker: str, cause: str) -> Detour:
    """What follows from a failed transfer."""
    failures = 1 + (before.failures if before is not None and before.maker == maker else 0)
    seconds = min(FIRST_SECONDS * 2 ** min(failures - 1, 30), LONGEST_SECONDS)
    return Detour(maker, cause, failures, time.monotonic() + seconds)
