"""Which replica gets what: by load and speed, and where the prefix was served last unless that is much busier. Pure.

Same arguments, same answer; and no result may depend on the answer (law 7): it only saves work.
"""

import hashlib
from collections.abc import Mapping, Sequence

BUSIER, SLACK = 1.5, 4.0
"""A home is left when its load is over BUSIER times the least load plus SLACK."""
ALIKE, LEAST = 1.25, 0.1


def home_of(key: str, replicas: Sequence[str]) -> str:
    """The replica whose cache a prefix belongs to, whoever asks: that of the highest hash (rendezvous hashing).

    When a replica leaves or joins, only its own prefixes move.
    """
    return max(replicas, key=lambda replica: hashlib.blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest())


def pick(loads: Mapping[str, float], home: str) -> str:
    """For one request: its home, or the least loaded replica when the home is gone or much busier."""
    least = min(loads, key=lambda replica: (loads[replica], replica))
    return home if home in loads and loads[home] <= BUSIER * loads[least] + SLACK else least


def assign(
    units: Sequence[tuple[float, str]], speeds: Mapping[str, float], loads: Mapping[str, float] | None = None
) -> list[str]:
    """Splits units of work, so that all replicas end at about the same time.

    Longest processing time first: the heaviest unit goes to the replica that is done with it first, counting what it
    has already. A unit with a home goes there instead as long as its home has less than its fair share, which ends no
    later than the best split there is.

    Args:
        units: (weight, home) of each; "" is no home.
        speeds: weight per second of each replica, > 0, in an order that breaks ties.
        loads: weight that replicas have from before.

    Returns:
        A replica for each unit.
    """
    got = {replica: (loads or {}).get(replica, 0.0) for replica in speeds}
    fair = (sum(weight for weight, _ in units) + sum(got.values())) / sum(speeds.values())
    counts, chosen = dict.fromkeys(speeds, 0), [""] * len(units)

    def end(replica: str, weight: float) -> float:
        return (got[replica] + weight) / speeds[replica]

    def give(place: int, replica: str) -> None:
        chosen[place], counts[replica] = replica, counts[replica] + 1
        got[replica] += units[place][0]

    def best(weight: float) -> str:
        return min(speeds, key=lambda replica: (end(replica, weight), counts[replica]))

    for weight in sorted({weight for weight, _ in units}, reverse=True):
        alike = [place for place, unit in enumerate(units) if unit[0] == weight]
        # Those with room at home go first, so that nobody else takes it.
        for place in alike:
            home = units[place][1]
            if home in speeds and end(home, weight) <= max(fair, end(best(weight), weight)):
                give(place, home)
        for place in alike:
            if not chosen[place]:
                give(place, best(weight))
    return chosen


class Speeds:
    """Weight per second of each replica, as an exponentially weighted mean of what it did.

    Args:
        share: of the newest observation.
    """

    def __init__(self, share: float = 0.3) -> None:
        self._share = share
        self._known: dict[str, float] = {}

    def saw(self, replica: str, weight: float, seconds: float) -> None:
        """A replica did so much in so long."""
        if weight <= 0 or seconds <= 0:
            return
        now, before = weight / seconds, self._known.get(replica)
        self._known[replica] = now if before is None else before + self._share * (now - before)

    def of(self, replicas: Sequence[str]) -> dict[str, float]:
        """Their speeds; one that is not known yet counts as the mean of the others, and so do all that are ALIKE.

        Drawn a little to the mean and never below LEAST of the fastest: one that was slow once is tried again.
        """
        known = [self._known[replica] for replica in replicas if replica in self._known]
        mean = sum(known) / len(known) if known else 1.0
        if not known or max(known) <= ALIKE * min(known):
            return dict.fromkeys(replicas, mean)
        drawn = {replica: 0.9 * self._known.get(replica, mean) + 0.1 * mean for replica in replicas}
        return {replica: max(speed, LEAST * max(drawn.values())) for replica, speed in drawn.items()}

    def forget(self, replica: str) -> None:
        """It is gone, or was started again."""
        self._known.pop(replica, None)
