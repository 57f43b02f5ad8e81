"""The controller is killed at every named point of a step: the same weights at the end, no step lost or doubled.

The roles live in this process and keep their state, as real ones do when only the controller dies.
"""

import asyncio
from pathlib import Path

import pytest

from tests.fakes.sextet import FakeSextet
from tests.integration.test_controller_process import Process, applied_once, controller, fakes, redis, store

__all__ = ["controller", "fakes", "redis", "store"]

POINTS = [
    "before_begin", "after_begin", "before_issue", "after_issue", "before_sync", "before_commit_weights", "after_sync",
    "before_commit", "after_commit", "before_checkpoint", "after_checkpoint",
]  # fmt: skip


@pytest.mark.chaos
@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_a_point_of_the_step(fakes: FakeSextet, controller: Process, point: str) -> None:
    await controller.create("undisturbed", total_steps=3)
    reference = model(await controller.end("undisturbed"))
    for counted in fakes.replicas.values():
        counted.done.clear()
        counted.rows.clear()
    await controller.kill()
    await controller.start(failpoints=f"controller.{point}=kill")
    await controller.create("r", total_steps=3)
    assert await asyncio.wait_for(controller.process.wait(), 60) == -9
    await controller.start()
    run = await controller.end("r")
    assert (run.state, run.reason, run.step) == ("done", "", 3)
    assert model(run) == reference
    assert applied_once(fakes, 3)


def model(run: object) -> str:
    return (Path(run.directory) / "model" / "model.json").read_text()  # type: ignore[attr-defined]
