"""A checkpoint that was cut off anywhere is refused by the name of the file, and the one before loads."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from services.actor.backends.torch import TorchActor
from shared.rpc.errors import FailedPrecondition
from shared.weights.grpc import GrpcPublisher
from tests.fakes.tiny import write_tiny_llama
from tests.fakes.training import make_config

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
OFFSETS = 20


def cut(directory: Path, offset: int) -> Path:
    """Cuts the checkpoint, its files one after another, at this byte; the file that was cut."""
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        size = path.stat().st_size
        if offset < size:
            with path.open("r+b") as file:
                file.truncate(offset)
            return path
        offset -= size
    raise AssertionError("the offset is beyond the checkpoint")


async def test_cut_at_twenty_offsets(tmp_path: Path) -> None:
    config = make_config(write_tiny_llama(tmp_path / "model"))
    actor = TorchActor(GrpcPublisher("here:1"), lambda: None)
    await actor.configure(config, "r", None)
    await (await actor.stage()).save(str(tmp_path / "before"))
    await (await actor.stage()).save(str(tmp_path / "whole"))
    total = sum(path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file())
    offsets = [0, total - 1, *random.Random(0).sample(range(1, total - 1), OFFSETS - 2)]
    for number, offset in enumerate(offsets):
        torn = tmp_path / f"torn{number}"
        shutil.copytree(tmp_path / "whole", torn)
        path = cut(torn, offset)
        with pytest.raises(FailedPrecondition, match=path.name.replace(".", r"\.")):
            await actor.configure(config, "r", str(torn))
        shutil.rmtree(torn)
    loaded = await actor.configure(config, "r", str(tmp_path / "before"))
    assert loaded.version == 0
    assert all(torch.isfinite(tensor).all() for tensor in actor._training.of("r").engine.model.parameters())
