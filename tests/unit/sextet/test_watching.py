"""A watch over a controller that is lost more than once."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sextet import client as module
from sextet.client import AsyncClient
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.rpc.errors import Unavailable


async def test_a_controller_lost_again_in_a_long_step_is_waited_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two events only: it counted as away since it was lost the first time, though it had been back."""
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.4)
    monkeypatch.setattr(module, "THERE_SECONDS", 0.4)
    streams = 0

    async def stream(*_: Any, **__: Any) -> AsyncIterator[pb.WatchRunResponse]:
        nonlocal streams
        streams += 1
        if streams == 1:
            yield pb.WatchRunResponse(event=pb.RunEvent(cursor="1"))
            raise Unavailable("it restarts")
        if streams == 2:
            # The run goes on: it is in a step.
            await asyncio.sleep(0.6)
            raise Unavailable("it restarts again")
        yield pb.WatchRunResponse(event=pb.RunEvent(cursor="2"))

    monkeypatch.setattr(module, "stream", stream)
    async with AsyncClient("127.0.0.1:1", "t") as client:
        assert [event.cursor async for event in client.watch("r")] == ["1", "2"]


async def test_a_controller_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.4)

    async def stream(*_: Any, **__: Any) -> AsyncIterator[pb.WatchRunResponse]:
        raise Unavailable("nobody listens")
        yield

    monkeypatch.setattr(module, "stream", stream)
    async with AsyncClient("127.0.0.1:1", "t") as client:
        with pytest.raises(Unavailable, match="nobody listens"):
            await anext(client.watch("r"))
