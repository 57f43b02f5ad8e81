"""What gRPC and HTTP graders have in common: requests of bounded size, retries, and what a failed request costs."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import structlog

from services.reward.backend import Grade, Item, failed
from shared.config import RunConfig
from shared.rpc.errors import FailedPrecondition, Unavailable

# Most gRPC servers refuse messages above 4 MiB unless told otherwise.
MAX_REQUEST_BYTES = 2 << 20
MAX_REQUEST_ITEMS = 64
BACKOFF_SECONDS = (0.2, 0.5, 1.0)

log = structlog.get_logger()


class Down(Exception):
    """Nobody answers there now; another attempt may find it back."""


class Failed(Exception):
    """This request was not graded. `kind` is as in `Grade`; a transient one is worth another attempt."""

    def __init__(self, kind: str, text: str, *, transient: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.transient = transient


class Transport(Protocol):
    """One request, one answer."""

    async def send(self, run: str, items: Sequence[Item]) -> list[Grade]:
        """One grade per item. Raises Down, Failed, or FailedPrecondition when the endpoint cannot be a grader."""
        ...

    async def close(self) -> None: ...


class ExternalBackend:
    """Grades through `connect(endpoint, timeout)`, with `reward.workers` requests in flight.

    A request that fails is repeated item by item, so that a bad one costs only itself. An endpoint that is down stays
    so for at most four attempts, then the call fails with Unavailable.
    """

    def __init__(self, connect: Callable[[str, float], Transport]) -> None:
        self._connect = connect
        self._transport: Transport | None = None
        self._endpoint = ""
        self._slots = asyncio.Semaphore(1)

    async def open(self, config: RunConfig) -> dict[str, str]:
        reward = config.reward
        self._endpoint = str(reward.endpoint)
        self._slots = asyncio.Semaphore(reward.workers)
        self._transport = self._connect(self._endpoint, reward.timeout)
        try:
            await self._probe()
        except BaseException:
            await self.close()
            raise
        return {"endpoint": self._endpoint}

    async def score(self, run: str, items: Sequence[Item]) -> list[Grade]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._grade(run, chunk)) for chunk in chunks(items)]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return [grade for task in tasks for grade in task.result()]

    async def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def _grade(self, run: str, items: Sequence[Item]) -> list[Grade]:
        try:
            return await self._ask(run, items)
        except Failed as error:
            if error.kind == "timeout":
                await self._probe()  # a frozen endpoint would cost its timeout once per item
            if len(items) == 1:
                return [failed(error.kind, str(error))]
        return [grade for item in items for grade in await self._grade(run, [item])]

    async def _probe(self) -> None:
        """Asks for no grades at all: who can't answer that is down, or no grader."""
        try:
            await self._ask("", [])
        except Failed as error:
            if error.kind == "timeout":
                raise self._unavailable(str(error)) from None
            if error.kind == "shape":
                text = f"reward.endpoint={self._endpoint!r} does not answer like a grader: {error}"
                raise FailedPrecondition(text, key="reward.endpoint", value=self._endpoint) from None
            log.warning("reward endpoint refuses an empty request", endpoint=self._endpoint, error=str(error))

    async def _ask(self, run: str, items: Sequence[Item]) -> list[Grade]:
        if self._transport is None:
            raise FailedPrecondition(f"reward.endpoint={self._endpoint!r} is closed")
        for pause in (*BACKOFF_SECONDS, None):
            try:
                async with self._slots:
                    return await self._transport.send(run, items)
            except Failed as error:
                if pause is None or not error.transient:
                    raise
            except Down as error:
                if pause is None:
                    raise self._unavailable(str(error)) from None
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def _unavailable(self, why: str) -> Unavailable:
        text = f"reward.endpoint={self._endpoint!r} is not available: {why}"
        return Unavailable(text, key="reward.endpoint", value=self._endpoint)


def chunks(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Runs of at most 64 items and 2 MiB of text; an item above that goes alone."""
    start, size = 0, 0
    for index, item in enumerate(items):
        size += item.size
        if index > start and (size > MAX_REQUEST_BYTES or index - start == MAX_REQUEST_ITEMS):
            yield items[start:index]
            start, size = index, item.size
    if start < len(items):
        yield items[start:]


def checked(results: Sequence[Grade], items: Sequence[Item]) -> list[Grade]:
    """The results when they are one per item; raises Failed otherwise."""
    if len(results) != len(items):
        raise Failed("shape", f"{len(results)} results for {len(items)} items")
    return list(results)
