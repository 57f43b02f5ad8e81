"""A line for every change of state, in a bounded file; a checkpoint's note of the last one is read with care."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.gen.sextet.v1 import actor_pb2, common_pb2
from shared.rpc import history
from shared.rpc.history import Applied, History
from shared.rpc.operations import Operations, payload_digest


def update(step: int) -> actor_pb2.ActorServiceUpdateRequest:
    request = actor_pb2.ActorServiceUpdateRequest()
    request.operation.epoch = 2
    request.operation.id.CopyFrom(common_pb2.OperationId(run="r", step=step, name="actor.update", part="0"))
    for uid, sample in (("1:4:0", 0), ("1:4:0", 1), ("1:2:1", 0)):
        request.inputs.blocks.add().rows.add(uid=uid, sample=sample)
    return request


async def apply(operations: Operations, step: int) -> None:
    async def work() -> actor_pb2.ActorServiceUpdateResponse:
        return actor_pb2.ActorServiceUpdateResponse(version=step)

    for _ in range(2):
        await operations.run(update(step), work, mutates=True)


async def test_every_change_of_state_is_a_line_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "actor-0.jsonl"
    operations = Operations(history=History(path, "i1"))
    await apply(operations, 1)
    await apply(operations, 2)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert {key: first[key] for key in ("run", "step", "name", "part", "epoch", "version", "incarnation")} == {
        "run": "r", "step": 1, "name": "actor.update", "part": "0", "epoch": 2, "version": 1, "incarnation": "i1",
    }  # fmt: skip
    assert first["prompts"] == ["1:4:0", "1:2:1"]
    assert first["payload"] == payload_digest(update(1)).hex() == second["payload"]
    assert second["step"] == 2


async def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_BYTES", 1000)
    operations = Operations(history=History(tmp_path / "a.jsonl", "i1"))
    for step in range(1, 50):
        await apply(operations, step)
    kept = texts(tmp_path)
    assert sorted(kept) == ["a.jsonl", "a.jsonl.1"]
    assert json.loads(kept["a.jsonl"].splitlines()[-1])["step"] == 49
    assert all(len(text) < 1500 for text in kept.values())


def texts(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


async def test_a_file_that_cannot_be_written_does_not_undo_what_is_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    operations = Operations(history=History(tmp_path / "file" / "a.jsonl", "i1"))
    await apply(operations, 1)
    assert operations.last_applied
    assert operations.last_applied.step == 1


@pytest.mark.parametrize(
    "change",
    [
        {"type": "google.protobuf.Any"},
        {"type": "sextet.v1.Nothing"},
        {"type": None},
        {"result": "!"},
        {"result": "/////w=="},
        {"step": "x"},
        {"payload": "zz"},
    ],
)
def test_what_is_not_understood_is_left_out(change: dict[str, Any]) -> None:
    applied = Applied(
        common_pb2.OperationId(run="r", name="actor.update"), 1, b"d", actor_pb2.ActorServiceUpdateResponse(version=3)
    )
    fields = json.loads(json.dumps(applied.fields()))
    assert Applied.from_fields(fields) == applied
    assert Applied.from_fields({**fields, **change}) is None
    assert Applied.from_fields({"run": "r", "step": 7, "name": "actor.update", "part": ""}) is None
