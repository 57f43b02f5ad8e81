"""Checks a recorded history: what was issued and committed (the journal), what was applied (the roles' own lines).

A run's *timeline* is what remains of its commits when rollbacks are followed. On it every step is there once, in order;
every change of state that was issued for it was applied once, in its take; versions and prompts follow one another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.controller.prompts import DatasetOrder

Line = Mapping[str, Any]


@dataclass
class Step:
    """A committed step: its journal line, the take that played it, and what was issued for it."""

    line: Line
    take: int
    before: int
    issued: frozenset[str] = frozenset()


@dataclass
class Timeline:
    """What the journal says, read as a controller reads it."""

    steps: dict[int, Step] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    step: int = 0
    position: int = 0
    take: int = 0
    epoch: int = 0
    issued: set[str] = field(default_factory=set)
    rolled_back: bool = False

    def read(self, line: Line) -> None:
        """Takes in one line."""
        # Written by a controller that was deposed and did not know it yet: no reader believes it.
        if line["epoch"] < self.epoch:
            return
        self.epoch = line["epoch"]
        getattr(self, f"_{line['kind']}")(line)

    def _issue(self, line: Line) -> None:
        if line["step"] != self.step + 1:
            self.wrong.append(f"{line['name']} was issued for step {line['step']} after step {self.step}")
        self.issued.add(line["name"])

    def _commit(self, line: Line) -> None:
        if line["step"] != self.step + 1:
            self.wrong.append(f"step {line['step']} was committed after step {self.step}")
        if line["position"] < self.position:
            self.wrong.append(f"step {line['step']} goes back from prompt {self.position} to {line['position']}")
        self.steps[line["step"]] = Step(line, self.take, self.position, frozenset(self.issued))
        self._stand(line)

    def _rollback(self, line: Line) -> None:
        if line["take"] != self.take + 1:
            self.wrong.append(f"take {line['take']} follows take {self.take}")
        self.take, self.rolled_back = line["take"], True

    def _begin(self, line: Line) -> None:
        if line["step"] > self.step and self.steps:
            self.wrong.append(f"the run begins at step {line['step']}, but step {self.step} was the last")
        if line["step"] < self.step and not self.rolled_back:
            self.wrong.append(f"the run begins at step {line['step']} after step {self.step} without a rollback")
        self.steps = {number: step for number, step in self.steps.items() if number <= line["step"]}
        # Taken up amid a step, what was issued for it still counts.
        issued = self.issued if line["step"] == self.step and not self.rolled_back else set()
        self._stand(line)
        self.issued, self.rolled_back = issued, False

    def _stand(self, line: Line) -> None:
        self.step, self.position, self.issued = line["step"], line["position"], set()


def violations(
    journal: Sequence[Line], applied: Mapping[str, Sequence[Line]], order: DatasetOrder | None = None
) -> list[str]:
    """What is wrong with a run's history; empty when every promise was kept.

    Args:
        journal: the lines of journal.jsonl, whole.
        applied: per replica, the lines that it wrote about this run, oldest first.
        order: of the dataset; when given, the prompts of every step are checked against it.
    """
    timeline = Timeline()
    for line in journal:
        timeline.read(line)
    learned = [line for replica in applied.values() for line in replica if line["name"].endswith(".update")]
    wrong = [*timeline.wrong, *_epochs(applied), *_doubled(learned), *_versions(timeline)]
    for number, step in timeline.steps.items():
        for name in sorted(step.issued):
            done = [line for line in learned if (line["name"], line["step"], _take(line)) == (name, number, step.take)]
            wrong += _once(name, number, step, done, order)
    return wrong


def _once(name: str, number: int, step: Step, done: Sequence[Line], order: DatasetOrder | None) -> list[str]:
    if len(done) != 1:
        return [f"{name} of step {number}, take {step.take}, was applied {len(done)} times"]
    role, version = name.partition(".")[0], done[0]["version"]
    if step.line["versions"].get(role) != version:
        return [f"step {number} commits version {step.line['versions'].get(role)} of {role}, which was at {version}"]
    if order is None:
        return []
    trained = sorted(int(uid.split(":")[1]) for uid in done[0]["prompts"])
    wanted = sorted(order.at(place) for place in range(step.before, step.line["position"]))
    return [] if trained == wanted else [f"{name} of step {number} trained on rows {trained}, not {wanted}"]


def _doubled(learned: Sequence[Line]) -> list[str]:
    """Also off the timeline an operation is applied once by the process that has its result."""
    seen, wrong = set(), []
    for line in learned:
        identity = line["name"], line["step"], line["part"], line["incarnation"]
        if identity in seen:
            wrong.append(f"{line['name']} of step {line['step']}, part {line['part']}, was applied twice in a process")
        seen.add(identity)
    return wrong


def _versions(timeline: Timeline) -> list[str]:
    wrong, before = [], {}
    for number, step in sorted(timeline.steps.items()):
        for role, version in step.line["versions"].items():
            changed = f"{role}.update" in step.issued
            if role in before and (version <= before[role] if changed else version != before[role]):
                wrong.append(f"step {number} takes {role} from version {before[role]} to {version}")
            before[role] = version
    expected = list(range(min(timeline.steps, default=1), timeline.step + 1))
    if sorted(timeline.steps) != expected:
        wrong.append(f"the timeline holds steps {sorted(timeline.steps)}, not {expected}")
    return wrong


def _epochs(applied: Mapping[str, Sequence[Line]]) -> list[str]:
    wrong = []
    for replica, lines in applied.items():
        highest = 0
        for line in lines:
            if line["epoch"] < highest:
                wrong.append(f"{replica} applied {line['name']} of step {line['step']} in epoch {line['epoch']}")
            highest = max(highest, line["epoch"])
    return wrong


def _take(line: Line) -> int:
    return int(line["part"].split(".")[0])
