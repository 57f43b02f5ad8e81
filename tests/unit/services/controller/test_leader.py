"""Two controllers over one store: one leads, the other takes over, the old one changes nothing any more."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.controller import checkpoints
from services.controller import runs as runs_module
from services.controller.conductor import Conductor, Deposed
from services.controller.journal import Journal, Position
from services.controller.leader import KEY, Leadership
from services.controller.recovery import EPOCH_KEY
from shared.config_loading import load_config
from shared.places import Local
from shared.rpc.errors import StaleEpoch, Unavailable
from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller
from tests.unit.services.controller.conftest import config as tree
from tests.unit.services.controller.test_failures import exported, undisturbed
from tests.unit.services.controller.test_lifecycle import holding

__all__ = ["undisturbed"]


async def test_the_second_takes_over_and_the_first_stops_writing(
    fakes: FakeSextet, store: Any, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "LEADING_SECONDS", 0.1)
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 2)
    async with Controller(store, tmp_path / "runs") as first:
        await first.create("r")
        async with Controller(store, tmp_path / "runs") as second:
            with pytest.raises(Unavailable, match="another leads"):
                await second.runs.list()
            await reached.wait()
            # The first one is frozen for longer than its lease: it does not know that it is no longer the leader.
            first.leadership._store = Frozen()  # type: ignore[assignment]
            await store.delete(KEY)
            await second.until(lambda: second.leadership.leads)
            go_on.set()
            record = await second.over("r")
            assert (record.state, record.reason) == ("done", "")
            assert exported(record.directory) == undisturbed[0]
            assert fakes["actor-0"].done["update"] == 3
        assert Journal.open(Path(record.directory)).position.step == 3


class Frozen:
    """A store that never answers."""

    async def acquire(self, *_: Any) -> bool:
        await asyncio.sleep(60)
        return True

    async def release(self, *_: Any) -> None:
        return None


async def test_a_lease_that_is_given_back_is_free_at_once(store: Any) -> None:
    first, second = Leadership(store, "a", ttl=60), Leadership(store, "b", ttl=60)
    async with second.sought():
        await second.gained.wait()
        async with first.sought():
            await asyncio.sleep(0.2)
            assert (first.leads, second.leads) == (False, True)
    async with first.sought():
        # The first one would try again after 20 s.
        async with asyncio.timeout(10):
            await first.gained.wait()
        assert await first.confirm()


async def test_a_late_commit_of_an_older_term_is_ignored(tmp_path: Path) -> None:
    old = Journal.open(tmp_path)
    await old.begin(1, Position(versions={"actor": 0}), {})
    new = Journal.open(tmp_path)
    await new.begin(2, Position(versions={"actor": 0}), {})
    await old.commit(1, Position(1, 4, {"actor": 1}))
    await new.issue(2, "actor.update")
    again = Journal.open(tmp_path)
    assert (again.position.step, again.epoch, again.issued) == (0, 2, {"actor.update"})


async def test_a_deposed_leader_leaves_the_checkpoint_of_its_successor_alone(tmp_path: Path) -> None:
    """Frozen while it saved, it wakes when another saves the same step into the same directory."""
    directory = tmp_path / "step_2"
    (directory / "actor").mkdir(parents=True)

    class Refusing:
        async def operate_kept(self, *_: Any) -> None:
            raise StaleEpoch("epoch 1 is over", highest="2")

    session: Any = SimpleNamespace(kept={"actor": None}, epoch=1)
    dispatcher: Any = Refusing()
    with pytest.raises(StaleEpoch):
        await checkpoints.save(Local(directory), session, dispatcher, Position(2, versions={"actor": 2}), 0, 2)
    assert (directory / "actor").exists()


async def test_a_leader_that_woke_up_takes_no_new_term(fakes: FakeSextet, store: Any, tmp_path: Path) -> None:
    """It would be a higher one than its successor's."""
    await fakes.start(*ALL)
    async with Controller(store, tmp_path / "runs") as controller:
        await controller.create("r", total_steps=1)
        await controller.over("r")
    before = await store.get(EPOCH_KEY)
    config = load_config(tree(total_steps=1))
    cluster: Any = None

    async def another_leads() -> bool:
        return False

    async def on_step(*_: Any) -> None:
        return None

    conductor = Conductor(store, cluster, "r", config, tmp_path / "other", on_step, another_leads)
    with pytest.raises(Deposed):
        await conductor.play()
    assert await store.get(EPOCH_KEY) == before
