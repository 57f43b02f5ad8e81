"""Handles: what a role call returns at once, and the scope that all calls of one step live in."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shared.gen.sextet.v1 import batch_pb2


@dataclass(frozen=True)
class Result:
    """What a finished call left.

    Attributes:
        call: its name, "reward.score".
        ref: the rows it made or read, by reference; None when it made none.
        metrics: the role's numbers.
        scores: score of each row (reward only), in the order of the ref's rows; NaN where not graded.
        began: when it began, on the monotonic clock.
        seconds: wall time.
        skipped: it was not done, and neither is what comes after it.
    """

    call: str
    ref: batch_pb2.BatchRef | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: tuple[float, ...] = ()
    began: float = 0.0
    seconds: float = 0.0
    skipped: bool = False


class CallFailed(Exception):
    """A call of a step failed; the rest of the step was cancelled. `cause` is why."""

    def __init__(self, call: str, cause: BaseException) -> None:
        super().__init__(f"{call}: {cause or type(cause).__name__}")
        self.call = call
        self.cause = cause


class Handle:
    """A call in progress. Pass it on to make another call wait for it, or `await` it for its Result.

    Attributes:
        parts: calls that make its rows piece by piece, in the order of the rows; () when it is done at once.
    """

    def __init__(self, name: str, task: asyncio.Task[Result], parts: "Sequence[Handle]" = ()) -> None:
        self.name = name
        self.parts = tuple(parts)
        self._task = task

    def __await__(self) -> Generator[Any, None, Result]:
        # Shielded: who waits may be cancelled, the call belongs to the step.
        return asyncio.shield(self._task).__await__()

    def __repr__(self) -> str:
        return f"<Handle {self.name} {'done' if self._task.done() else 'running'}>"


Work = Callable[[list[Result]], Awaitable[Result]]


class Scope:
    """Runs the calls of one step: each starts when the handles it was given are done; the first failure ends all."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self.results: list[Result] = []

    async def __aenter__(self) -> "Scope":
        await self._group.__aenter__()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            await self._group.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            failed = next((each for each in group.exceptions if isinstance(each, CallFailed)), None)
            raise failed or CallFailed("forward", group.exceptions[0]) from None

    def start(self, name: str, work: Work, inputs: Sequence[Handle], after: Sequence[Handle] = ()) -> Handle:
        """Begins `work(results of inputs)` once inputs and `after` are done; skips it when one of them was skipped."""
        return Handle(name, self._group.create_task(self._counted(name, work, inputs, after), name=name))

    def start_parts(
        self,
        name: str,
        parts: Sequence[tuple[Work, Sequence[Handle]]],
        join: Callable[[list[Result]], Result],
        after: Sequence[Handle] = (),
    ) -> Handle:
        """One call in parts, each of which begins when its own inputs are done; what counts is the whole."""
        begun = [
            Handle(name, self._group.create_task(self._run(name, work, inputs, after), name=name))
            for work, inputs in parts
        ]

        async def whole(results: list[Result]) -> Result:
            return join(results)

        return Handle(name, self._group.create_task(self._counted(name, whole, begun, ()), name=name), begun)

    async def _counted(self, name: str, work: Work, inputs: Sequence[Handle], after: Sequence[Handle]) -> Result:
        result = await self._run(name, work, inputs, after)
        if not result.skipped:
            self.results.append(result)
        return result

    async def _run(self, name: str, work: Work, inputs: Sequence[Handle], after: Sequence[Handle]) -> Result:
        results = [await handle for handle in inputs]
        gates = [await handle for handle in after]
        if any(result.skipped for result in (*results, *gates)):
            return Result(name, skipped=True)
        started = time.monotonic()
        try:
            result = await work(results)
        except (CallFailed, asyncio.CancelledError):
            raise
        except Exception as error:
            raise CallFailed(name, error) from error
        # A call in parts began with the first of them.
        return result if result.began else replace(result, began=started, seconds=time.monotonic() - started)
