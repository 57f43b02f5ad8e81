"""Who watches or asks at a controller that another one has deposed is sent to that one."""

import asyncio

import pytest

from services.controller.leader import KEY
from shared.rpc.errors import Unavailable
from shared.state import StateStore
from tests.unit.services.controller.conftest import Controller


async def test_a_watch_at_a_deposed_controller_ends(controller: Controller, store: StateStore) -> None:
    """There the run never came to its end: the watch went on for as long as its call might take."""
    await controller.create("r")
    kinds: list[str] = []

    async def watch() -> None:
        async for event in controller.runs.watch("r", ""):
            kinds.append(event.kind)

    watching = asyncio.create_task(watch())
    await controller.until(lambda: bool(kinds))
    # As after a freeze that was longer than its lease.
    await store.put(KEY, b"another", 600)
    with pytest.raises(Unavailable, match="another leads"):
        await asyncio.wait_for(watching, 20)


async def test_who_asks_a_controller_that_does_not_know_yet_is_sent_on_too(
    controller: Controller, store: StateStore
) -> None:
    """It was an internal error, after which nobody tries again."""
    record = await controller.create("r")
    await controller.until(lambda: record.state == "running")
    await store.put(KEY, b"another", 600)
    with pytest.raises(Unavailable, match="another leads"):
        await controller.create("later")
