"""Is the engine alive: a token of it, again and again, with a deadline of its own.

The probe shares nothing with rows in progress (hf: a prefill beside the slots; vLLM: a request of its own when idle, a
question between two steps otherwise), so it changes no sample.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import structlog
from prometheus_client import Gauge, Histogram

from shared.rpc.errors import FailedPrecondition

log = structlog.get_logger()
T = TypeVar("T")

PERIOD_SECONDS = 1.0
SUSPECT_SHARE = 1 / 3
"""Of the deadline: so late, the engine gets no new work."""
ERRORS_UNTIL_DEAD = 2
COMMIT_BYTES_PER_SECOND = 1e8
"""So slow, an engine may still take weights."""

PROBE_SECONDS = Histogram(
    "sextet_rollout_probe_duration_seconds", "Time of one token.", buckets=(0.01, 0.05, 0.2, 1, 3, 9)
)
STANDING = Gauge("sextet_rollout_engine_standing", "0: answers, 1: suspect, 2: dead.")


def standing(late: float, deadline: float, errors: int) -> str:
    """What the engine is: "" (well), "suspect" or "dead".

    Args:
        late: seconds that the present probe has gone without an answer or any progress of the engine.
        deadline: seconds that it may.
        errors: answers in a row that were errors.
    """
    if late >= deadline or errors >= ERRORS_UNTIL_DEAD:
        return "dead"
    return "suspect" if errors or late >= deadline * SUSPECT_SHARE else ""


class EngineWatch:
    """Probes the engine for as long as the replica lives.

    Args:
        probe: makes a token; "" when that works, else why not; None when there is no engine to ask now.
        progress: counts what the engine has done; an engine that does something is not dead, however long its queue is.
        deadline: seconds after which an engine that neither answers nor progresses is dead.

    Attributes:
        fault: what is wrong; "" when nothing is.
        state: "", "suspect" or "dead".
    """

    def __init__(
        self, probe: Callable[[], Awaitable[str | None]], progress: Callable[[], int], deadline: float
    ) -> None:
        self._probe, self._progress, self._deadline = probe, progress, deadline
        self._excused: list[float] = []
        self._excused_at = 0.0
        self._dead = asyncio.Event()
        self._errors = 0
        self.fault = self.state = self._died_of = ""

    async def run(self, on_dead: Callable[[], Awaitable[None]]) -> None:
        """Probes until cancelled. `on_dead` gets rid of a dead engine; afterwards all begins anew."""
        while True:
            await self._ask()
            if self.state == "dead":
                self._died_of = self.fault
                log.error("the engine is dead", reason=self.fault)
                self._dead.set()
                await on_dead()
                self._errors = 0
                self._judge(0, "")
                self._dead.clear()
            await asyncio.sleep(PERIOD_SECONDS)

    async def unless_dead(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result; FailedPrecondition as soon as the engine is dead, also when it can't be stopped."""
        doing, dying = asyncio.create_task(work), asyncio.create_task(self._dead.wait())
        try:
            await asyncio.wait({doing, dying}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            raise FailedPrecondition(f"the engine is dead: {self._died_of}")
        finally:
            # What a dead engine does not give back is not waited for: the process is about to go.
            left = {dying} if dying.done() else {doing, dying}
            doing.add_done_callback(lambda task: task.cancelled() or task.exception())
            doing.cancel()
            dying.cancel()
            await asyncio.wait(left)

    @contextlib.contextmanager
    def excused(self, seconds: float = math.inf) -> Iterator[None]:
        """Meanwhile the engine is not asked: what it does may take so long without a token."""
        self._excused.append(seconds)
        self._excused_at = time.monotonic()
        try:
            yield
        finally:
            self._excused.remove(seconds)

    def for_weights(self, size: int) -> float:
        """Seconds that an engine may take for new weights of so many bytes, once its rows are done."""
        return 3 * self._deadline + size / COMMIT_BYTES_PER_SECOND

    async def _look_on(self) -> None:
        moved, beats = time.monotonic(), self._progress()
        while self._excused and self.state != "dead":
            await asyncio.sleep(min(PERIOD_SECONDS, self._deadline * SUSPECT_SHARE / 4))
            if (now := self._progress()) != beats:
                beats, moved = now, time.monotonic()
            late = time.monotonic() - max(moved, self._excused_at)
            if self._excused and late >= max(self._excused):
                self._judge(self._deadline, f"the engine has stood still for {late:.1f} s over new weights")

    async def _ask(self) -> None:
        if self._excused:
            return await self._look_on()
        moved, beats, question = time.monotonic(), self._progress(), asyncio.ensure_future(self._probe())
        started = moved
        try:
            while not question.done() and self.state != "dead":
                if self._excused:
                    return None
                await asyncio.wait({question}, timeout=self._deadline * SUSPECT_SHARE / 4)
                if (now := self._progress()) != beats:
                    beats, moved = now, time.monotonic()
                late = time.monotonic() - moved
                self._judge(late, f"the engine has made no token for {late:.1f} s")
            if question.done() and not self._excused:
                self._answered(question, time.monotonic() - started)
        finally:
            question.cancel()
            await asyncio.wait({question}, timeout=PERIOD_SECONDS)
        return None

    def _answered(self, question: "asyncio.Future[str | None]", seconds: float) -> None:
        error = question.exception()
        answer = f"{type(error).__name__}: {error}" if error else question.result()
        if answer is not None:
            PROBE_SECONDS.observe(seconds)
        self._errors = self._errors + 1 if answer else 0
        self._judge(0, answer or "")

    def _judge(self, late: float, reason: str) -> None:
        self.state = standing(late, self._deadline, self._errors)
        self.fault = reason if self.state else ""
        STANDING.set(("", "suspect", "dead").index(self.state))
