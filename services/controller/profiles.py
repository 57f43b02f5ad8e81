"""Profiles that people ask for: calls of a role that are recorded in the next steps, and what their ranks have seen."""

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from services.controller.replica import Member
from services.controller.telemetry import PROFILE
from services.controller.verbs import PROFILED, Verb
from shared.gen.sextet.v1 import controller_pb2
from shared.rpc.errors import FailedPrecondition

log = structlog.get_logger()

MAX_STEPS = 10
"""That one may ask for, and of which a run keeps the traces of a role: those recorded last."""
_TRACE = re.compile(r"\.?step-(?P<step>\d+)-(?P<role>\w+)\.")
"""What ranks write (shared/training/profiling.py), and what one that died in the middle of it leaves."""
Calls = list[controller_pb2.CallProfile]
Tell = Callable[[str, int, Mapping[str, float]], Awaitable[None]]


@dataclass
class Wanted:
    """One who asked: how many steps are still to come, what was recorded so far, and where the answer goes."""

    role: str
    steps: int
    answer: "asyncio.Future[Calls]"
    calls: Calls = field(default_factory=list)

    def end(self, why: str) -> None:
        """Answers with what there is; if that is nothing, `why`, or what went wrong with it."""
        if self.answer.done():
            return
        if any(rank.path for call in self.calls for rank in call.ranks):
            self.answer.set_result(self.calls)
        else:
            faults = [f"{call.call} on {call.replica}: {fault}" for call in self.calls for fault in faults_of(call)]
            self.answer.set_exception(FailedPrecondition(f"no trace was written: {faults[0] if faults else why}"))


class Profiles:
    """Those of one run in progress.

    Args:
        directory: where the traces go.
        tell: told of every recorded call: a sentence, the step, and numbers.
    """

    def __init__(self, directory: Path, tell: Tell) -> None:
        self._directory, self._tell = directory, tell
        self._wanted: list[Wanted] = []
        self._closed = False
        # Of the present step: who asked before it began, the calls so far, and what was recorded.
        self._served: list[Wanted] = []
        self._names: Counter[str] = Counter()
        self._calls: Calls = []

    def ask(self, role: str, steps: int) -> "asyncio.Future[Calls]":
        """Records all calls of the role in the next steps; resolves when they are done.

        Raises (the future): FailedPrecondition: no trace was written.
        """
        wanted = Wanted(role, steps, asyncio.get_running_loop().create_future())
        self._wanted.append(wanted)
        if self._closed:
            self.close()
        return wanted.answer

    def begin(self) -> None:
        """A step begins, maybe not for the first time."""
        self._wanted = [wanted for wanted in self._wanted if not wanted.answer.done()]
        self._served, self._names, self._calls = list(self._wanted), Counter(), []

    def mark(self, verb: Verb, request: Any) -> None:
        """Asks the replica to record the work, if somebody wants it."""
        if verb not in PROFILED or not any(wanted.role == verb.role for wanted in self._served):
            return
        self._names[verb.name] += 1
        again = f"-{count}" if (count := self._names[verb.name]) > 1 else ""
        name = f"step-{request.operation.id.step}-{verb.name}{again}"
        request.profile.prefix = str(self._directory / name)

    def take(self, verb: Verb, member: Member, request: Any, response: Any) -> None:
        """What came of a call."""
        if verb in PROFILED and request.HasField("profile") and response.profile:
            step, replica = request.operation.id.step, member.info.replica
            self._calls.append(
                controller_pb2.CallProfile(step=step, call=verb.name, replica=replica, ranks=response.profile)
            )

    async def end(self) -> None:
        """The step is committed: tells what was recorded, and answers those who have all their steps."""
        for call in self._calls:
            numbers = measure(call)
            await self._tell(describe(call, numbers, self._directory), call.step, numbers)
        if self._calls:
            await asyncio.to_thread(prune, self._directory)
        for wanted in self._served:
            calls = [call for call in self._calls if call.call.startswith(f"{wanted.role}.")]
            wanted.calls += calls
            wanted.steps -= bool(calls)
            if wanted.steps <= 0:
                wanted.end("")

    def close(self) -> None:
        """No step follows: answers everybody."""
        self._closed = True
        for wanted in self._wanted:
            wanted.end("the run stopped before the step after this was asked for was done")
        self._wanted = self._served = []


def prune(directory: Path) -> None:
    """Removes traces but those of the MAX_STEPS steps of each role that were recorded last."""
    steps: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in directory.glob("*"):
        if named := _TRACE.match(path.name):
            steps[named["role"]][named["step"]].append(path)
    try:
        for recorded in steps.values():
            # By time and not by number: a run that goes back to a checkpoint plays steps again.
            oldest_first = sorted(recorded.values(), key=lambda paths: max(path.stat().st_mtime_ns for path in paths))
            for path in (path for paths in oldest_first[:-MAX_STEPS] for path in paths):
                path.unlink()
    except OSError as error:
        log.warning("old traces are not removed", directory=str(directory), error=str(error))


def measure(call: controller_pb2.CallProfile) -> dict[str, float]:
    """The extremes over a call's ranks, also for Prometheus."""
    numbers: dict[str, float] = {"ranks": len(call.ranks)}
    seen = [rank for rank in call.ranks if not rank.fault]
    for name in ("seconds", "communication_share", "compute_share", "memory_peak_gib"):
        values = [getattr(rank, name) for rank in seen]
        if values:
            numbers |= {f"{name}_min": min(values), f"{name}_max": max(values)}
            for extreme, value in (("lowest", min(values)), ("highest", max(values))):
                if name.endswith("_share"):
                    PROFILE.labels(call.call, name.removesuffix("_share"), extreme).set(value)
    return numbers


def describe(call: controller_pb2.CallProfile, numbers: Mapping[str, float], directory: Path) -> str:
    """A call in a sentence for people."""
    parts = [f"{call.call} on {call.replica}", *faults_of(call)[:2]]
    if "seconds_max" in numbers:
        low, high = (numbers[f"communication_share_{extreme}"] for extreme in ("min", "max"))
        seconds, ranks = numbers["seconds_max"], len(call.ranks)
        parts.append(f"{seconds:.2f} s, {ranks} ranks, {low:.0%} to {high:.0%} communication: {directory}")
    return "; ".join(parts)


def faults_of(call: controller_pb2.CallProfile) -> list[str]:
    """What went wrong with the profilers of a call's ranks."""
    return [f"rank {rank.rank}: {rank.fault}" for rank in call.ranks if rank.fault]
