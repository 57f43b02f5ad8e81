"""Files that execute something when they are unpickled: planted in a checkpoint or a model they are an error."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import xxhash

from services.reward.backends.model import LoadedModel
from shared.config import ModelConfig
from shared.rpc.errors import FailedPrecondition
from shared.training.errors import CheckpointError, ModelError
from shared.training.models import load_policy, load_value_model
from tests.fakes.reward import write_tiny_reward_model
from tests.fakes.tiny import write_tiny_llama
from tests.unit.shared.training.test_training_checkpoint import load, make_engine, save


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, int, int]]:
        return os.open, (str(self._path), os.O_CREAT | os.O_WRONLY, 0o600)


@pytest.fixture
def fuse(tmp_path: Path) -> Path:
    """Does not exist, and must not at the end."""
    return tmp_path / "executed"


def test_the_bomb_works(fuse: Path) -> None:
    os.close(pickle.loads(pickle.dumps(Bomb(fuse))))
    assert fuse.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"])
@pytest.mark.parametrize("manifest_too", [False, True])
def test_a_planted_checkpoint_file_is_refused(tmp_path: Path, fuse: Path, name: str, manifest_too: bool) -> None:
    engine = make_engine(write_tiny_llama(tmp_path / "m"))
    directory = tmp_path / "step"
    save(engine, directory)
    torch.save({"weight": Bomb(fuse)}, directory / name)
    if manifest_too:
        manifest = json.loads((directory / "manifest.json").read_text())
        manifest["files"][name]["xxh3_128"] = xxhash.xxh3_128_hexdigest((directory / name).read_bytes())
        (directory / "manifest.json").write_text(json.dumps(manifest))
    # Whoever can write the manifest, too, gets past the digests, and still only to readers that execute nothing.
    with pytest.raises(CheckpointError):
        load(engine, directory)
    assert not fuse.exists()


def test_planted_metadata_of_a_sharded_checkpoint_is_not_read(tmp_path: Path, fuse: Path) -> None:
    engine = make_engine(write_tiny_llama(tmp_path / "m"))
    directory = tmp_path / "step"
    save(engine, directory)
    (directory / ".metadata").write_bytes(pickle.dumps(Bomb(fuse)))
    load(engine, directory)
    assert not fuse.exists()


@pytest.mark.parametrize("kind", ["policy", "value", "reward"])
def test_pickled_weights_of_a_model_are_refused(tmp_path: Path, fuse: Path, kind: str) -> None:
    directory = (write_tiny_reward_model if kind == "reward" else write_tiny_llama)(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    torch.save({"weight": Bomb(fuse)}, directory / "pytorch_model.bin")
    config = ModelConfig(path=str(directory))
    opened = {"policy": load_policy, "value": load_value_model, "reward": LoadedModel}[kind]
    with pytest.raises((ModelError, FailedPrecondition)):
        opened(config)
    assert not fuse.exists()


@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path, fuse: Path, kind: str) -> None:
    directory = (write_tiny_reward_model if kind == "reward" else write_tiny_llama)(tmp_path / "m")
    settings = json.loads((directory / "config.json").read_text())
    settings |= {"model_type": "planted", "auto_map": {"AutoConfig": "planted.Planted", "AutoModel": "planted.Planted"}}
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "planted.py").write_text(f"open({str(fuse)!r}, 'w')\nclass Planted: ...\n")
    config = ModelConfig(path=str(directory))
    with pytest.raises((ModelError, FailedPrecondition)):
        (LoadedModel if kind == "reward" else load_policy)(config)
    assert not fuse.exists()
