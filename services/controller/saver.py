"""The checkpoint in progress: the roles stand still while they copy their state, and write the copy beside other steps.

There is one at a time. A step changes nothing before the copies are made.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from services.controller import checkpoints
from services.controller.cluster import Session
from services.controller.dispatch import Dispatcher
from services.controller.journal import Position
from shared.places import Place

Asked = asyncio.Future[tuple[str, int]]
Retried = Callable[[str, Place, Callable[[int], Awaitable[None]]], Awaitable[None]]
Tell = Callable[[Place, int, dict[str, float]], Awaitable[None]]


class Saver:
    """Saves the positions of one run.

    Args:
        root: where the checkpoints go, `step_N` each.
        keep: how many stay.
        retried: does work until it succeeds, or gives up.
        tell: told of a new checkpoint's directory, step, and numbers.

    Attributes:
        step: of the newest checkpoint, or of the one in progress.
        oldest: step of the oldest one that the run may go back to.
    """

    def __init__(self, root: Place, keep: int, retried: Retried, tell: Tell) -> None:
        self._root, self._keep, self._retried, self._tell = root, keep, retried, tell
        self._task: asyncio.Task[None] | None = None
        self._asked: list[Asked] = []
        self._copied: asyncio.Future[None] | None = None
        self._refused: set[int | None] = set()
        self.step = self.oldest = 0

    @property
    def ended(self) -> bool:
        """The checkpoint in progress has come to its end, good or bad, and nobody has seen it yet."""
        return self._task is not None and self._task.done()

    async def begin(self, session: Session, dispatcher: Dispatcher, position: Position, asked: Sequence[Asked]) -> None:
        """Begins a checkpoint of the position, at which the roles are; waits for the one before.

        Args:
            asked: who is told directory and step when it is done.
        """
        await self.end()
        self._copied = asyncio.get_running_loop().create_future()
        self._asked, self.step = list(asked), position.step
        self._task = asyncio.create_task(self._save(session, dispatcher, position, self._copied))

    async def copied(self) -> None:
        """Returns when the roles may change their state.

        Raises:
            whatever kept them from copying it.
        """
        if self._copied is not None:
            await asyncio.shield(self._copied)

    async def end(self) -> None:
        """Waits for the checkpoint in progress, if there is one.

        Raises:
            CannotWrite: it could not be written; StateLost and others: the run has to go back.
        """
        if self._task is None:
            return
        await asyncio.wait({self._task})
        self._task.result()
        self._task = None

    async def abandon(self) -> list[Asked]:
        """Gives the checkpoint in progress up; returns who is not answered yet. What the roles write stays half."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = self._copied = None
        unanswered, self._asked = [asked for asked in self._asked if not asked.done()], []
        return unanswered

    async def look(self, position: int, start: int) -> None:
        """Takes note of what is on disk.

        Args:
            position: the step at which the run is. What is newer was refused, and is written anew.
            start: the step at which it began, should there be nothing.
        """
        there = await asyncio.to_thread(checkpoints.directories, self._root)
        found = [each.position.step for each in await asyncio.to_thread(checkpoints.readable, there)]
        good = [step for step in found if step <= position]
        # Damaged ones, too.
        self._refused = {checkpoints.step_of(directory.name) for directory in there} - {*good}
        self.step, self.oldest = max(good, default=start), min(good, default=0)

    async def _save(
        self, session: Session, dispatcher: Dispatcher, position: Position, copied: asyncio.Future[None]
    ) -> None:
        directory, started, copying = self._root / f"step_{position.step}", time.monotonic(), 0.0

        async def save(attempt: int) -> None:
            nonlocal copying
            if not copied.done():
                copying = await checkpoints.stage(session, dispatcher, position, attempt)
                copied.set_result(None)
            await checkpoints.save(directory, session, dispatcher, position, attempt, self._keep)

        try:
            if position.step in self._refused:
                await asyncio.to_thread((directory / checkpoints.MANIFEST).remove)
            if new := not await asyncio.to_thread(checkpoints.is_complete, directory):
                await self._retried(f"checkpoint of step {position.step}", directory, save)
        except BaseException as error:
            if not copied.done():
                copied.set_exception(error if isinstance(error, Exception) else RuntimeError("given up"))
                # Maybe nobody waits for it.
                copied.exception()
            raise
        if not copied.done():
            copied.set_result(None)
        await self.look(position.step, position.step)
        for asked in self._asked:
            if not asked.done():
                asked.set_result((str(directory), position.step))
        if new:
            numbers = {"seconds": time.monotonic() - started, "copy_seconds": copying}
            await self._tell(directory, position.step, numbers)
