"""A run whose checkpoints are in a store: saved, kept, gone back to, begun from; nothing of it on the disk."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from shared.places import place
from shared.rpc.errors import InvalidArgument
from tests.fakes.s3 import serving
from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller
from tests.unit.services.controller.test_failures import exported, undisturbed

__all__ = ["undisturbed"]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with serving() as bucket:
        yield bucket


async def test_a_restarted_role_goes_back_to_the_newest_whole_checkpoint_in_the_store(
    fakes: FakeSextet, controller: Controller, undisturbed: Any, bucket: str
) -> None:
    await fakes.start(*ALL)
    root, tasks = place(f"{bucket}/runs") / "r", []
    actor = fakes["actor-0"]

    async def restart(request: Any) -> None:
        if request.operation.id.step == 3:
            actor.hooks.clear()
            async with asyncio.timeout(20):
                while not await asyncio.to_thread((root / "step_2" / "run.json").exists):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            # The newest is torn: a file that the role needs is gone.
            await asyncio.to_thread((root / "step_2" / "critic" / "state.json").write, b"{")
            asyncio.get_running_loop().call_later(0.2, lambda: tasks.append(asyncio.create_task(actor.start())))
            await actor.kill()
            await asyncio.sleep(60)

    actor.hooks["update"] = restart
    record = await controller.create("r", checkpoint__directory=f"{bucket}/runs", checkpoint__save_interval=1)
    await controller.over("r", 60)
    assert (record.state, record.reason) == ("done", "")
    assert exported(record.directory) == undisturbed[0]
    recoveries = [message for kind, _, message in await controller.events("r") if kind == "recovery"]
    assert any("goes on from step 1" in message for message in recoveries)
    assert not (controller.root / "r" / "checkpoints").exists()
    assert await asyncio.to_thread(root.children) == ["step_2", "step_3"]
    start = f"{bucket}/runs/r/step_3"
    longer = await controller.create("longer", total_steps=4, resume_from=start)
    await controller.over("longer")
    assert (longer.state, longer.step) == ("done", 4)
    assert actor.done["update"] == 2 + 2 + 1
    # What was refused was written anew.
    assert b"version" in await asyncio.to_thread((root / "step_2" / "critic" / "state.json").read)


async def test_a_store_that_cannot_be_written_is_refused_at_once(controller: Controller, bucket: str) -> None:
    with pytest.raises(InvalidArgument, match=r"checkpoint\.directory cannot be written: s3://nowhere/x"):
        await controller.create("r", checkpoint__directory="s3://nowhere/x")
    with pytest.raises(InvalidArgument, match=r"checkpoint\.directory: 's3://b' is no place for checkpoints"):
        await controller.create("r", checkpoint__directory="s3://b")
    with pytest.raises(InvalidArgument, match=r"resume_from: 'gs://b/x' is no place for checkpoints"):
        await controller.create("r", resume_from="gs://b/x")
