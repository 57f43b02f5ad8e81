"""Grades with a Python function of the user's, in child processes that can be killed."""

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from services.reward.backend import Grade, Item, failed, valid_grade
from services.reward.child import CannotStart, GraderProcess
from shared.config import RunConfig
from shared.rpc.errors import FailedPrecondition

MAX_BATCH = 32


class FunctionBackend:
    """A pool of `reward.workers` grader processes.

    A function with verl's signature gets one response a call. One with TRL's gets up to 32, and when that call fails
    each of them again alone, so that a bad one costs only itself. Every call has `reward.timeout` seconds.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._graders: list[GraderProcess] = []
        self._timeout = 0.0
        self._batch = 1

    async def open(self, config: RunConfig) -> dict[str, str]:
        reward = config.reward
        function = str(reward.function)
        self._timeout = reward.timeout
        self._graders = [GraderProcess(function, reward.kwargs, self._memory_bytes) for _ in range(reward.workers)]
        started = await asyncio.gather(*(grader.start() for grader in self._graders), return_exceptions=True)
        errors = [answer for answer in started if isinstance(answer, BaseException)]
        if errors:
            await self.close()
            if isinstance(errors[0], CannotStart):
                raise FailedPrecondition(str(errors[0]), key="reward.function", value=function)
            raise errors[0]
        self._batch = MAX_BATCH if started[0] == "trl" else 1
        return {"function": function, "signature": str(started[0]), "workers": str(reward.workers)}

    async def score(self, run: str, items: Sequence[Item]) -> list[Grade]:
        if not self._graders:
            raise FailedPrecondition("reward.function is not loaded", key="reward.function")
        size = max(1, min(self._batch, math.ceil(len(items) / len(self._graders))))
        waiting = deque(range(0, len(items), size))
        grades: dict[int, Grade] = {}

        async def serve(grader: GraderProcess) -> None:
            while waiting:
                start = waiting.popleft()
                grades.update(enumerate(await self._grade(grader, items[start : start + size]), start))

        async with asyncio.TaskGroup() as group:
            for grader in self._graders:
                group.create_task(serve(grader))
        return [grades[index] for index in range(len(items))]

    async def close(self) -> None:
        graders, self._graders = self._graders, []
        await asyncio.gather(*(grader.stop() for grader in graders))

    async def _grade(self, grader: GraderProcess, items: Sequence[Item]) -> list[Grade]:
        answer = await grader.ask([_wire(item) for item in items], self._timeout)
        results = answer.get("results")
        if isinstance(results, list) and len(results) == len(items):
            return [_grade(result) for result in results]
        if len(items) == 1:
            return [failed(str(answer.get("kind", "shape")), str(answer.get("error", "no result")))]
        return [grade for item in items for grade in await self._grade(grader, [item])]


def _wire(item: Item) -> dict[str, Any]:
    return {
        "data_source": item.data_source,
        "prompt": item.prompt,
        "response": item.response,
        "ground_truth": item.ground_truth,
        "extra_info": item.extra_info,
    }


def _grade(result: Mapping[str, Any]) -> Grade:
    if "score" in result:
        return valid_grade(result["score"], result.get("parts"))
    return failed(str(result.get("kind", "shape")), str(result.get("error", "no score")))
