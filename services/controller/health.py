"""The health of a replica: from what is seen of it to whether it may be given work."""

from collections.abc import Mapping
from enum import Enum


class Health(Enum):
    """Only a healthy replica gets work; a dead one comes back by way of restarting and stale."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"


class Sign(Enum):
    """What can be seen of a replica."""

    ANSWERS = "answers"
    """Its engine makes tokens in time."""
    FAILS = "fails"
    """Its engine is late, or answers with an error."""
    LOST = "lost"
    """Its engine or process is dead."""
    BACK = "back"
    """It is being started again, or was just started."""
    LOADED = "loaded"
    """It holds the run, with weights that may be old."""
    OUTDATED = "outdated"
    """It missed a weight update."""
    CURRENT = "current"
    """It serves the run's present weights."""


_ANYWHERE: Mapping[Sign, Health] = {Sign.LOST: Health.DEAD}
_NEXT: Mapping[tuple[Health, Sign], Health] = {
    (Health.HEALTHY, Sign.FAILS): Health.SUSPECT,
    (Health.HEALTHY, Sign.BACK): Health.RESTARTING,
    (Health.HEALTHY, Sign.OUTDATED): Health.STALE,
    (Health.SUSPECT, Sign.ANSWERS): Health.HEALTHY,
    (Health.SUSPECT, Sign.BACK): Health.RESTARTING,
    (Health.SUSPECT, Sign.OUTDATED): Health.STALE,
    (Health.DEAD, Sign.BACK): Health.RESTARTING,
    (Health.RESTARTING, Sign.LOADED): Health.STALE,
    (Health.STALE, Sign.BACK): Health.RESTARTING,
    (Health.STALE, Sign.CURRENT): Health.HEALTHY,
}


def advance(health: Health, sign: Sign) -> Health:
    """The health after a sign; one that says nothing in this state changes nothing."""
    return _ANYWHERE.get(sign) or _NEXT.get((health, sign), health)


def sign_of(state: str) -> Sign | None:
    """What a replica's own word in the registry says of its engine; None: nothing."""
    return {
        "ready": Sign.ANSWERS,
        "busy": Sign.ANSWERS,
        "suspect": Sign.FAILS,
        "dead": Sign.LOST,
        "restarting": Sign.BACK,
    }.get(state)
