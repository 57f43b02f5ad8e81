"""Saved and loaded bit for bit; anything torn or changed is found before it is read."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes

from shared import places
from shared.config import ModelConfig, OptimizerConfig, TrainingConfig
from shared.places import Local
from shared.training import checkpoint, saving
from shared.training.engine import Engine
from shared.training.errors import CheckpointError, DamagedError
from shared.training.image import DTYPES, Image
from shared.training.models import Policy, load_policy, load_value_model
from shared.training.saving import Saved, StateCopy
from tests.unit.shared.training.test_training_engine import likelihood, make_block

FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json")


def make_engine(path: Path) -> Engine[Policy]:
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1)
    config = TrainingConfig(optimizer=optimizer, micro_batch_size=2, mini_batch_size=4)
    return Engine(load_policy(ModelConfig(path=str(path))), config, seed=3, norm_length=16)


def train(one: Engine[Policy], steps: range) -> None:
    for step in steps:
        one.update(make_block(seed=step), likelihood(one.model, "token-mean"), step=step)


def copy_of(one: Engine[Policy]) -> StateCopy:
    return StateCopy("actor").take(one.model, one.optimizer, {"kl_coef": 0.25})


def save(one: Engine[Policy], directory: Path) -> Saved:
    return copy_of(one).write(Local(directory))


def load(one: Engine[Policy], directory: Path) -> dict[str, object]:
    return checkpoint.load(Local(directory), one.model, one.optimizer, role="actor")


def bits(one: Engine[Policy]) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in [*one.model.named_parameters(), *one.optimizer.state().items()]}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_two_and_two_steps_are_four_bit_for_bit(tiny_llama: Path, tmp_path: Path) -> None:
    straight = make_engine(tiny_llama)
    train(straight, range(4))
    first = make_engine(tiny_llama)
    train(first, range(2))
    saved = save(first, tmp_path / "deep" / "step-2")
    random_numbers = torch.rand(3)
    second = make_engine(tiny_llama)
    state = load(second, tmp_path / "deep" / "step-2")
    assert state == {"kl_coef": 0.25, "optimizer_steps": 4}
    assert torch.equal(torch.rand(3), random_numbers)
    train(second, range(2, 4))
    assert second.optimizer.steps == straight.optimizer.steps == 8
    assert same(bits(second), bits(straight))
    assert sorted(p.name for p in (tmp_path / "deep" / "step-2").iterdir()) == list(FILES)
    assert saved.bytes == sum(p.stat().st_size for p in (tmp_path / "deep" / "step-2").iterdir())
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["step-2"]


def test_the_same_state_has_the_same_digest(tiny_llama: Path, tmp_path: Path) -> None:
    one = make_engine(tiny_llama)
    train(one, range(1))
    first = save(one, tmp_path / "a")
    assert save(one, tmp_path / "a") == first == save(one, tmp_path / "b")
    train(one, range(1, 2))
    assert save(one, tmp_path / "a").digest != first.digest


def test_an_untrained_model_is_saved_without_moments(tiny_llama: Path, tmp_path: Path) -> None:
    one, other = make_engine(tiny_llama), make_engine(tiny_llama)
    save(one, tmp_path / "a")
    assert load(other, tmp_path / "a")["optimizer_steps"] == 0
    assert same(bits(one), bits(other))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damage_is_found_named_and_changes_nothing(tiny_llama: Path, tmp_path: Path, name: str, damage: str) -> None:
    one = make_engine(tiny_llama)
    train(one, range(1))
    save(one, tmp_path / "a")
    path = tmp_path / "a" / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    other = make_engine(tiny_llama)
    before = bits(other)
    with pytest.raises(CheckpointError) as raised:
        load(other, tmp_path / "a")
    # A flipped bit in the manifest may fall into another file's digest: then that file is named.
    assert name in str(raised.value) or name == "manifest.json"
    assert same(bits(other), before)


def test_a_manifest_cannot_point_elsewhere(tiny_llama: Path, tmp_path: Path) -> None:
    save(make_engine(tiny_llama), tmp_path / "a")
    path = tmp_path / "a" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../secret"] = {"bytes": 1, "xxh3_128": "0" * 32}
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="missing"):
        load(make_engine(tiny_llama), tmp_path / "a")


def test_a_checkpoint_without_its_optimizer_state_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    one, other = make_engine(tiny_llama), make_engine(tiny_llama)
    save(one, tmp_path / "untrained")
    train(one, range(1))
    save(one, tmp_path / "a")
    # As whole as any other, by its digests.
    shutil.copy(tmp_path / "untrained" / "optimizer.safetensors", tmp_path / "a")
    manifest, moments = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("a", "untrained"))
    manifest["files"]["optimizer.safetensors"] = moments["files"]["optimizer.safetensors"]
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest))
    before = bits(other)
    with pytest.raises(CheckpointError, match="no optimizer state although 2 optimizer steps were taken"):
        load(other, tmp_path / "a")
    assert same(bits(other), before)


def rewritten(directory: Path, name: str, content: bytes) -> None:
    """Another file, as whole as any by the manifest's digests."""
    (directory / name).write_bytes(content)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][name]["xxh3_128"] = xxhash.xxh3_128_hexdigest(content)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def moments_without(directory: Path, lacking: str) -> bytes:
    tensors = load_file(directory / "optimizer.safetensors")
    return safetensors_bytes({key: tensor for key, tensor in tensors.items() if lacking not in key})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("optimizer.safetensors", partial(moments_without, lacking="/lm.model.norm.weight"),
         "optimizer state of 'lm.model.norm.weight' is missing although 2 optimizer steps were taken"),
        ("optimizer.safetensors", partial(moments_without, lacking="exp_avg/lm.model.norm.weight"),
         "optimizer state of 'lm.model.norm.weight' is incomplete: only exp_avg_sq, step"),
        ("state.json", lambda _: b"[]", "state.json' is damaged: it does not say optimizer_steps"),
        ("state.json", lambda _: b"{}", "state.json' is damaged: it does not say optimizer_steps"),
        ("rng.safetensors", lambda _: safetensors_bytes({}), "rng.safetensors' is damaged: it has no 'cpu'"),
        ("rng.safetensors", lambda _: safetensors_bytes({"cpu": torch.zeros(3)}),
         "rng.safetensors' is damaged: 'cpu' is no random state"),
    ],
)  # fmt: skip
def test_what_its_digests_do_not_show_is_found_and_changes_nothing(
    tiny_llama: Path, tmp_path: Path, name: str, content: Callable[[Path], bytes], said: str
) -> None:
    one, other = make_engine(tiny_llama), make_engine(tiny_llama)
    train(one, range(1))
    save(one, tmp_path / "a")
    rewritten(tmp_path / "a", name, content(tmp_path / "a"))
    before, random_state = bits(other), torch.get_rng_state()
    with pytest.raises(DamagedError, match=re.escape(said)):
        load(other, tmp_path / "a")
    assert same(bits(other), before)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_what_cannot_be_read_now_is_not_damaged(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_engine(tiny_llama), tmp_path / "a")

    def broken(_: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(CheckpointError, match=r"manifest\.json' can't be read: .*Input/output error") as raised:
        load(make_engine(tiny_llama), tmp_path / "a")
    assert not isinstance(raised.value, DamagedError)


def test_another_role_or_model_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    one = make_engine(tiny_llama)
    save(one, tmp_path / "a")
    critic = Engine(load_value_model(ModelConfig(path=str(tiny_llama))), TrainingConfig(), seed=0, norm_length=1)
    with pytest.raises(CheckpointError, match="role"):
        checkpoint.load(Local(tmp_path / "a"), critic.model, critic.optimizer, role="critic")
    with pytest.raises(CheckpointError, match="another model"):
        checkpoint.load(Local(tmp_path / "a"), critic.model, critic.optimizer, role="actor")


def test_nothing_is_left_when_the_disk_is_full(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_engine(tiny_llama)
    save(one, tmp_path / "a")
    train(one, range(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(places.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"No space left on device \(it needs \d+ bytes\)"):
        save(one, tmp_path / "a")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert load(make_engine(tiny_llama), tmp_path / "a")["optimizer_steps"] == 0


def test_a_disk_without_room_for_all_of_it_gets_nothing(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_engine(tiny_llama)
    needed = save(one, tmp_path / "a").bytes - (tmp_path / "a" / "manifest.json").stat().st_size
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    train(one, range(1))
    with pytest.raises(CheckpointError, match=rf"/a' could not be .*it needs \d+ bytes and {needed - 1} are free"):
        save(one, tmp_path / "a")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert load(make_engine(tiny_llama), tmp_path / "a")["optimizer_steps"] == 0


def test_what_is_trained_after_the_copy_is_not_in_the_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    one, other = make_engine(tiny_llama), make_engine(tiny_llama)
    train(one, range(1))
    before, copy = bits(one), copy_of(one)
    train(one, range(1, 2))
    copy.write(Local(tmp_path / "a"))
    assert load(other, tmp_path / "a")["optimizer_steps"] == copy.version == 2
    assert same(bits(other), before)
    # Written again, it is the same; taken again, it is what is there now.
    assert copy.write(Local(tmp_path / "b")) == copy.write(Local(tmp_path / "b"))
    copy.take(one.model, one.optimizer, {}).write(Local(tmp_path / "b"))
    load(other, tmp_path / "b")
    assert same(bits(other), bits(one))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_in_memory_is_a_safetensors_file(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.arange(12).view(3, 4)
    tensors = {"odd": torch.arange(3, dtype=torch.uint8), "x": numbers.to(dtype).t(), "scalar": numbers[2, 3].to(dtype)}
    image = Image()
    for wanted in (tensors, {}, {"none": torch.empty(0, 3, dtype=dtype)}):
        image.fill(wanted)
        (tmp_path / "f").write_bytes(image.content)
        read = load_file(tmp_path / "f")
        assert same(read, wanted)
        assert {name: tensor.dtype for name, tensor in read.items()} == {name: t.dtype for name, t in wanted.items()}


def test_a_draft_of_a_killed_process_is_swept_away(tiny_llama: Path, tmp_path: Path) -> None:
    one = make_engine(tiny_llama)
    save(one, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / ".a.1.tmp")
    save(one, tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


POINTS = (
    "training.step",
    "checkpoint.staged",
    "checkpoint.write",
    "checkpoint.manifest",
    "directory.rename",
    "directory.done",
)
SCRIPT = """
import os, sys
from pathlib import Path
from tests.unit.shared.training.test_training_checkpoint import POINTS, load, make_engine, save, train
model, root = map(Path, sys.argv[1:])
for point in POINTS:
    if (child := os.fork()) == 0:
        os.environ["SEXTET_FAILPOINTS"] = f"{point}=kill"
        one = make_engine(model)
        load(one, root / point / "step-1")
        train(one, range(1, 2))
        save(one, root / point / "step-2")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_process_killed_while_it_saves_leaves_the_last_checkpoint_whole(tiny_llama: Path, tmp_path: Path) -> None:
    """At every point; a new directory that was not finished is not there."""
    one = make_engine(tiny_llama)
    train(one, range(1))
    for point in POINTS:
        (tmp_path / point).mkdir()
        save(one, tmp_path / point / "step-1")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tiny_llama), str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=True)
    assert ended.stdout.split() == [str(-signal.SIGKILL)] * len(POINTS)
    for point in POINTS:
        complete = sorted(path for path in (tmp_path / point).iterdir() if not path.name.startswith("."))
        assert [path.name for path in complete] == ["step-1", *(["step-2"] if point == "directory.done" else [])]
        for path in complete:
            assert load(make_engine(tiny_llama), path)["optimizer_steps"] == (4 if path.name == "step-2" else 2)
