"""Callers of the API that go away in the middle: what they asked for is done, or it is as if they had not asked."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from services.controller import records as records_module
from shared.rpc.errors import InvalidArgument
from shared.state import StateStore
from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller, failing


class Disk:
    """One whose first write takes as long as the test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        write = records_module.write_atomically

        def slow(path: Path, content: bytes) -> None:
            if not self.asked.is_set():
                self.asked.set()
                self.go_on.wait(60)
            write(path, content)

        monkeypatch.setattr(records_module, "write_atomically", slow)

    async def cuts_off(self, call: Coroutine[Any, Any, Any]) -> None:
        """The call begins and its caller goes away, as gRPC tells it: the handler is cancelled."""
        task = asyncio.create_task(call)
        await asyncio.to_thread(self.asked.wait, 60)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


async def test_a_run_whose_creation_was_cut_off_can_be_cancelled(
    store: StateStore, controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in `sextet run`: nobody knew the run, and the next controller found it on disk and played it."""
    disk = Disk(monkeypatch)
    await disk.cuts_off(controller.create("r"))
    cancelling = asyncio.create_task(controller.runs.cancel("r"))
    await asyncio.sleep(0)
    disk.go_on.set()
    assert (await cancelling).state == "cancelled"
    await controller.__aexit__()
    async with controller:
        assert [(each.id, each.state) for each in await controller.runs.list()] == [("r", "cancelled")]


async def test_a_resumed_run_is_played_though_who_resumed_it_has_gone(
    fakes: FakeSextet, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was queued, and nobody woke up to play it; resumed again, it was queued already."""
    await fakes.start(*ALL)
    found, look = [], controller.runs._next
    monkeypatch.setattr(controller.runs, "_next", lambda: found.append(look()) or found[-1])
    fakes["reward-0"].hooks["score"] = failing(lambda: InvalidArgument("broken"), 1)
    await controller.create("r")
    record = await controller.over("r")
    assert record.state == "failed"
    await controller.until(lambda: found[-1] is None)
    disk = Disk(monkeypatch)
    await disk.cuts_off(controller.runs.resume("r"))
    disk.go_on.set()
    await controller.until(lambda: record.state == "done", 30)
