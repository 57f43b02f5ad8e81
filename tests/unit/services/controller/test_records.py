"""The store keeps what the last runs left; all runs are known by their files."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from services.controller import records as records_module
from services.controller.events import stream_key
from services.controller.records import PREFIX, Record, Records
from shared.state.memory import MemoryStore
from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller


async def test_a_hundred_runs_leave_what_a_few_do(
    fakes: FakeSextet, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "KEPT", 2)
    await fakes.start(*ALL)
    names = [f"r{number}" for number in range(6)]
    async with Controller(store, tmp_path / "runs") as controller:
        for name in names:
            await controller.create(name, total_steps=1)
            assert (await controller.over(name)).state == "done"
        await left(store, names[-2:])
    async with Controller(store, tmp_path / "runs") as controller:
        listed = await controller.runs.list()
        assert [(each.id, each.state, each.step) for each in listed] == [(name, "done", 1) for name in reversed(names)]
        assert await controller.events("r0") == []
        assert (await controller.events("r5"))[-1] == ("state", 1, "done")


async def left(store: MemoryStore, names: list[str]) -> None:
    """Waits until the store holds these runs' keys, and no others'."""
    async with asyncio.timeout(20):
        while sorted(await store.scan(PREFIX)) != [PREFIX + name for name in names]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert sorted(store._streams) == [stream_key(name) for name in names]


async def test_those_that_are_not_over_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "KEPT", 1)
    store = MemoryStore()
    records = Records(store, tmp_path)
    states = ["failed", "paused", "queued", "running", "done", "cancelled"]
    for number, state in enumerate(states):
        records.known[state] = Record(state, "", str(tmp_path), {}, state, finished=float(number))
        await records.keep(records.known[state])
    await records.trim()
    assert {key.removeprefix(PREFIX) for key in await store.scan(PREFIX)} == {*states} - {"failed", "done"}


async def test_a_run_whose_end_no_disk_knows_stays_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be played again from the record on disk, which says that it runs."""
    monkeypatch.setattr(records_module, "KEPT", 0)
    records = Records(MemoryStore(), tmp_path)
    record = records.known["r"] = Record("r", "", str(tmp_path), {}, "running")
    await records.keep(record)
    record.state = "done"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records_module, "write_atomically", full)
        await records.keep(record)
        await records.trim()
        await records.load()
        assert records.known["r"].state == "done"
    await records.trim()
    await records.load()
    assert records.known["r"].state == "done"
    assert await records._store.scan(PREFIX) == {}


async def test_a_record_that_cannot_be_read_keeps_no_other_run_from_being_played(tmp_path: Path) -> None:
    """A controller that had found one led for ever and played nothing."""
    records = Records(MemoryStore(), tmp_path)
    for id in ("a", "b"):
        await records.keep(Record(id, "", str(tmp_path), {}))
    newer = {**asdict(Record("newer", "", str(tmp_path), {})), "a_field_of_tomorrow": 1}
    damaged = {
        "damaged": b'{"id": "dam',
        "no-text": b"\xff\xfe",
        "no-record": b"[]",
        "empty": b"",
        "half": b'{"id": "h"}',
    }
    for name, content in {**damaged, "newer": json.dumps(newer).encode()}.items():
        (tmp_path / "records" / f"{name}.json").write_bytes(content)
    await records.load()
    assert sorted(records.known) == ["a", "b", "newer"]
