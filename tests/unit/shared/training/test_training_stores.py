"""Checkpoints in a store: the same bits come back; what was not finished, or was changed, is refused by its name."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.actor.backends.torch import TorchActor
from services.critic.backends.torch import TorchCritic
from shared.places import Place, Remote, place
from shared.rpc.errors import InvalidArgument
from shared.training import checkpoint
from shared.training.errors import CheckpointError
from shared.training.group import ALONE, Group
from shared.weights.grpc import GrpcPublisher
from tests.fakes.ranks import run_ranks
from tests.fakes.s3 import serving
from tests.fakes.training import make_config
from tests.unit.shared.training import test_training_shards as ranks
from tests.unit.shared.training.test_training_checkpoint import bits, copy_of, make_engine, same, train

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with serving() as bucket:
        yield bucket


def load(one: Any, directory: Place) -> dict[str, Any]:
    return checkpoint.load(directory, one.model, one.optimizer, role="actor")


def test_the_same_bits_come_back_and_nothing_stays_on_this_disk(
    tiny_llama: Path, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, other, directory = make_engine(tiny_llama), make_engine(tiny_llama), place(f"{bucket}/bits/step_1/actor")
    train(one, range(1))
    first = copy_of(one).write(directory)
    assert copy_of(one).write(directory) == first
    assert load(other, directory)["optimizer_steps"] == 2
    assert same(bits(one), bits(other))
    assert sorted(directory.children()) == sorted(checkpoint._file_names(1) | {checkpoint.MANIFEST})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_writer_that_stopped_leaves_no_checkpoint(
    tiny_llama: Path, bucket: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, directory = make_engine(tiny_llama), place(f"{bucket}/stopped-{name}/actor")
    copy_of(one).write(directory)
    put = Remote.put

    def stop(self: Remote, content: memoryview) -> str:
        if self.name == name:
            raise SystemExit("as killed")
        return put(self, content)

    monkeypatch.setattr(Remote, "put", stop)
    # Killed, nobody cleans up.
    remove = Remote.remove
    monkeypatch.setattr(Remote, "remove", lambda self: remove(self) if self.name == "manifest.json" else None)
    with pytest.raises(SystemExit):
        copy_of(one).write(directory)
    assert "optimizer.safetensors" in directory.children()
    with pytest.raises(CheckpointError, match=rf"'{directory}' is no complete checkpoint: it has no manifest.json"):
        load(one, directory)


def test_damage_and_absence_are_named_as_in_the_store(tiny_llama: Path, bucket: str) -> None:
    one, directory = make_engine(tiny_llama), place(f"{bucket}/damage/actor")
    with pytest.raises(CheckpointError, match=rf"'{directory}' is no complete checkpoint: there is nothing"):
        load(one, directory)
    copy_of(one).write(directory)
    before = bits(one)
    (directory / "model.safetensors").write(b"x")
    with pytest.raises(CheckpointError, match=rf"'{directory}/model.safetensors' is damaged: its digest is another"):
        load(one, directory)
    assert same(bits(one), before)
    with pytest.raises(CheckpointError, match=r"could not be written: s3://nowhere/x"):
        copy_of(one).write(place("s3://nowhere/x"))


@pytest.mark.parametrize("role", [TorchActor(GrpcPublisher("here:1"), lambda: None), TorchCritic(lambda: None)])
async def test_a_role_without_the_extra_says_so_before_it_trains(role: Any, tiny_llama: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    config = make_config(tiny_llama, "checkpoint.directory=s3://b/x")
    with pytest.raises(InvalidArgument, match=r"'s3://b/x' needs the extra s3: pip install 'sextet\[s3\]'"):
        await role.configure(config, "r", None)


def on_rank(group: Group, job: dict[str, Any]) -> bool:
    engine = ranks.make_engine(job["model"], group, {"tp": 2})
    ranks.load(engine, job["one"])
    before = [part.clone() for part in ranks.parts(engine)]
    ranks.save(engine, job["two"])
    ranks.train(engine, 1)
    ranks.load(engine, job["two"])
    return ranks.unchanged(engine, before) and bool(ranks.refused(partial(ranks.load, engine, job["two"] + "x")))


def test_two_ranks_read_what_one_wrote_and_the_other_way_round(tiny_llama: Path, bucket: str) -> None:
    one = ranks.make_engine(str(tiny_llama), ALONE, {})
    ranks.train(one, 1)
    ranks.save(one, f"{bucket}/ranks/one")
    job = {"model": str(tiny_llama), "one": f"{bucket}/ranks/one", "two": f"{bucket}/ranks/two"}
    assert run_ranks("tests.unit.shared.training.test_training_stores:on_rank", 2, job) == [True, True]
    before = [part.clone() for part in ranks.parts(one)]
    ranks.train(one, 2)
    ranks.load(one, job["two"])
    assert ranks.unchanged(one, before)
