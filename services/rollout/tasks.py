"""Rows that agents make: a row of the dataset is offered as a task, and a conversation about it comes back."""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from services.rollout.backend import EngineError
from shared.batch.columns import RowKey
from shared.data.datasets import PromptExample

if TYPE_CHECKING:
    from services.rollout.openai.sessions import Session

MAX_LOST = 3
"""So many agents may take a task and not come back."""
LOOK_SECONDS = 1.0

log = structlog.get_logger()


@dataclass(eq=False)
class Task:
    """A row to be made.

    Attributes:
        seed: turn k of its conversation is sampled with a seed made of this.
        greedy: its turns are.
        session: the conversation of the agent that has it; None: it waits for one.
        lost: agents that have taken it and did not come back.
        over: told when its conversation is; None: nobody waits for it.
    """

    key: RowKey
    example: PromptExample
    seed: int
    greedy: bool
    validation: bool
    session: "Session | None" = None
    lost: int = 0
    over: "Callable[[Task], None] | None" = None

    def finish(self) -> None:
        """The agent has said how good the conversation was, or that it can't say."""
        if self.over:
            self.over(self)

    def about(self) -> dict[str, Any]:
        """For the agent."""
        prompt, extra_info = json.loads(self.example.prompt_json), json.loads(self.example.extra_info)
        texts = {"data_source": self.example.data_source, "ground_truth": self.example.ground_truth}
        key = {"uid": self.key.uid, "sample": self.key.sample}
        return {**key, "prompt": prompt, **texts, "extra_info": extra_info, "validation": self.validation}


class Tasks:
    """What is open on this replica, handed out in order."""

    def __init__(self) -> None:
        self._waiting: deque[Task] = deque()
        self._offered = asyncio.Event()

    async def claim(self, seconds: float) -> Task | None:
        """The next task, which is the caller's from now on; None when there is none for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._waiting:
                    self._offered.clear()
                    await self._offered.wait()
        return self._waiting.popleft() if self._waiting else None

    def give_back(self, task: Task) -> None:
        """Its agent will not end it: another one may."""
        task.session = None
        self._offer([task])

    async def play(self, tasks: Sequence[Task], patience: float) -> AsyncGenerator[Task, None]:
        """Offers tasks; yields each, with its session, when its conversation is over.

        Args:
            patience: seconds without a turn after which an agent is taken for gone; so long tasks wait for one.

        Raises:
            EngineError: no agent asks for tasks, or MAX_LOST have taken one, and none has said a word.
        """
        ended: asyncio.Queue[Task] = asyncio.Queue(len(tasks) + 1)
        open_ = set(tasks)

        def over(task: Task) -> None:
            if task in open_:
                open_.remove(task)
                ended.put_nowait(task)

        for task in tasks:
            task.over = over
        self._offer(tasks)
        try:
            for _ in tasks:
                yield await self._next(ended, open_, patience)
        finally:
            self._waiting = deque(task for task in self._waiting if task not in open_)
            for task in open_:
                task.session = task.over = None

    async def _next(self, ended: "asyncio.Queue[Task]", open_: set[Task], patience: float) -> Task:
        alone = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(ended.get(), LOOK_SECONDS)
            taken = [task for task in open_ if task.session]
            self._take_from_lost([task for task in taken if task.session and task.session.idle > patience])
            alone = 0.0 if taken else alone + LOOK_SECONDS
            if alone >= patience:
                raise EngineError(
                    f"no agent has asked for a task for {alone:.0f} s (rollout.agent_timeout): {len(open_)} wait for "
                    "some that claim them, POST /v1/sessions/claim"
                )

    def _take_from_lost(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            task.lost += 1
            log.warning("an agent did not come back", uid=task.key.uid, sample=task.key.sample, times=task.lost)
            if task.lost < MAX_LOST:
                self.give_back(task)
            elif task.session and task.session.turns:
                task.finish()
            else:
                raise EngineError(f"task {task.key}: {task.lost} agents took it and did not come back")

    def _offer(self, tasks: Sequence[Task]) -> None:
        self._waiting.extend(tasks)
        self._offered.set()
