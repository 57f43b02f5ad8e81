"""One replica may be several processes: what all of them do together. Torch-free; see shared/training/spmd.py."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

T = TypeVar("T")
Handlers = dict[type[Message], Callable[[Any], Awaitable[object]]]
"""What a rank does for each kind of request that all ranks work on together."""


class Ranks(Protocol):
    """The processes that are one replica together."""

    @property
    def end(self) -> str:
        """Why they are about to end; "" while they are not."""
        ...

    async def together(self, request: Message, work: Callable[[], Awaitable[T]]) -> T:
        """Has every other rank handle the request, does `work` here, and answers when all are done.

        Raises:
            SextetError: what all ranks raised; GroupEnds: one of them failed alone.
        """
        ...


class Alone:
    """A replica of one process."""

    end = ""

    async def together(self, request: Message, work: Callable[[], Awaitable[T]]) -> T:
        return await work()
