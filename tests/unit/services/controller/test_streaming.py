"""Finished parts of a step's samples are scored while others are generated; the result is the same to the bit."""

import asyncio
from typing import Any

import pytest

from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller
from tests.unit.services.controller.test_failures import exported

REPLICAS = (*ALL, "rollout-1")


async def played(controller: Controller, id: str, pieces: int) -> str:
    await controller.create(id, rollout={"n": 2, "pieces": pieces})
    record = await controller.over(id)
    assert (record.state, record.reason) == ("done", "")
    return exported(record.directory)


@pytest.mark.parametrize("pieces", [2, 4, 9])
async def test_pieces_change_nothing_but_the_time(fakes: FakeSextet, controller: Controller, pieces: int) -> None:
    await fakes.start(*REPLICAS)
    whole = await played(controller, "whole", 1)
    asked = fakes["reward-0"].done["score"]
    assert await played(controller, "pieces", pieces) == whole
    # A prompt is not cut.
    assert fakes["reward-0"].done["score"] - asked == asked * min(pieces, 4)
    assert set(fakes["actor-0"].rows["update"].values()) == {2}


async def test_a_finished_piece_is_scored_while_the_other_is_generated(
    fakes: FakeSextet, controller: Controller
) -> None:
    await fakes.start(*ALL)
    scored = asyncio.Event()
    first: set[str] = set()

    async def generate(request: Any) -> None:
        # The first prompt's piece goes through; the others wait until somebody has scored it.
        if request.operation.id.step == 1 and not request.prompts[0].uid.endswith(":0"):
            await asyncio.wait_for(scored.wait(), 10)

    async def score(request: Any) -> None:
        first.update(row.uid for row in request.inputs.blocks[0].rows)
        scored.set()

    fakes["rollout-0"].hooks["generate"] = generate
    fakes["reward-0"].hooks["score"] = score
    await played(controller, "r", 4)
    assert scored.is_set()
