"""What is known of a run while it is watched: fed with its events, asked for lines, tables and sums."""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.gen.sextet.v1 import controller_pb2 as pb

OVER = ("done", "failed", "cancelled")
SPARKS = "▁▂▃▄▅▆▇█"


@dataclass
class Progress:
    """One run's history, from its events.

    Attributes:
        steps: metrics of every committed step.
        spent: seconds of every step in each role call.
        checkpoint: directory of the last checkpoint.
    """

    id: str
    name: str
    total: int
    state: str = "queued"
    reason: str = ""
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    spent: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    checkpoint: str = ""

    def feed(self, event: pb.RunEvent) -> str | None:
        """Takes an event; a line when it is something to tell."""
        if event.kind == "call":
            self.spent[event.step][event.message] += event.metrics["seconds"]
            return None
        if event.kind == "step":
            self.steps[event.step] = dict(event.metrics)
            self.total = max(self.total, _total(event.message))
            return self.line(event.step)
        if event.kind == "validation":
            numbers = "  ".join(f"{name} {value}" for name, value in shown(event.metrics).items())
            return f"validation of {event.message}: {numbers}"
        if event.kind == "state":
            self.state = event.message
            return f"run {self.id} is {event.message}"
        if event.kind == "checkpoint":
            self.checkpoint = event.message
            return f"checkpoint of step {event.step}: {event.message}"
        if event.kind == "error":
            self.reason = event.message
        if event.kind == "recovery" and event.metrics.get("lost_steps"):
            for step in [step for step in self.steps if step > event.step]:
                del self.steps[step]
                self.spent.pop(step, None)
        return f"{event.kind}: {event.message}"

    def line(self, step: int) -> str:
        """A committed step in a line."""
        numbers = "  ".join(f"{name} {value}" for name, value in shown(self.steps[step]).items())
        return f"step {step}/{self.total}  {numbers}  {self.busy(step)}"

    def busy(self, step: int) -> str:
        """Who worked how much of a step; roles work side by side, so the shares may add up to more than 100 %."""
        seconds = self.steps[step].get("seconds", 0.0)
        roles: dict[str, float] = defaultdict(float)
        for call, spent in self.spent[step].items():
            roles[call.partition(".")[0]] += spent
        shares = sorted(((spent / seconds if seconds else 0.0, role) for role, spent in roles.items()), reverse=True)
        return " ".join(f"{role} {share:.0%}" for share, role in shares if share >= 0.005)

    def curve(self, name: str) -> list[float]:
        """One number over the committed steps."""
        return [self.steps[step][name] for step in sorted(self.steps) if name in self.steps[step]]

    def calls(self) -> dict[str, list[float]]:
        """Seconds of every role call, a value for each step that made it."""
        calls: dict[str, list[float]] = defaultdict(list)
        for step in sorted(self.steps):
            for call, seconds in self.spent[step].items():
                calls[call].append(seconds)
        return dict(calls)


def shown(metrics: Mapping[str, float]) -> dict[str, str]:
    """The numbers of a step that a person follows."""
    known = {
        "reward": ("reward", "{:.3f}"),
        "kl": ("kl", "{:.4f}"),
        "response_length": ("length", "{:.1f}"),
        "tokens_per_second": ("tokens/s", "{:,.0f}"),
        "seconds": ("seconds", "{:.2f}"),
    }
    return {label: form.format(metrics[name]) for name, (label, form) in known.items() if name in metrics}


def sparkline(values: list[float], width: int) -> str:
    """The values as a row of blocks, averaged down to `width`."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(SPARKS[round((mean - low) / (high - low or 1) * (len(SPARKS) - 1))] for mean in means)


def _total(message: str) -> int:
    """7 of "step 3 of 7"."""
    last = message.rpartition(" ")[2]
    return int(last) if last.isdecimal() else 0
