"""A loss or gradient that is not finite pauses the run with the reason; nothing is lost, and it can be played on."""

from typing import Any

import pytest

from shared.rpc.errors import NotFinite
from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller
from tests.unit.services.controller.test_failures import exported, undisturbed

__all__ = ["undisturbed"]


@pytest.mark.parametrize("role", ["actor", "critic"])
async def test_an_update_that_is_not_finite_pauses_the_run(
    fakes: FakeSextet, controller: Controller, undisturbed: Any, role: str
) -> None:
    await fakes.start(*ALL)

    async def diverge(request: Any) -> None:
        if request.operation.id.step == 2:
            raise NotFinite("the loss is nan at optimizer step 2")

    fakes[f"{role}-0"].hooks["update"] = diverge
    record = await controller.create("r", checkpoint__save_interval=100)
    for _ in range(2):
        await controller.until(lambda: record.state in ("paused", "failed", "done"))
        assert (record.state, record.step) == ("paused", 1)
        assert f"{role}.update: the loss is nan at optimizer step 2; `sextet resume r`" in record.reason
        # Played on, the same step is refused again: nothing else was trained on meanwhile.
        await controller.runs.resume("r")
        await controller.until(lambda: record.state != "queued")
    await controller.until(lambda: record.state == "paused")
    fakes[f"{role}-0"].hooks.clear()
    await controller.runs.resume("r")
    await controller.over("r")
    assert (record.state, exported(record.directory)) == ("done", undisturbed[0])
    assert fakes["actor-0"].done["configure"] == 1
    assert fakes["actor-0"].done["update"] == fakes["critic-0"].done["update"] == 3
