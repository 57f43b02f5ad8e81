"""Weights on their way into vLLM's processes: checked against the model, then a safetensors file in memory."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from services.rollout.backends.parameters import matched

TRANSFER = "sextet"
"""The `weight_transfer_config.backend` under which vllm_transfer.py registers itself in vLLM's workers."""
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class WeightsFile:
    """A version in a private directory of its own."""

    version: int
    path: str

    def remove(self) -> None:
        shutil.rmtree(Path(self.path).parent, ignore_errors=True)


@dataclass(frozen=True)
class InWorkers:
    """A version that the workers have received themselves."""

    version: int
    path = ""

    def remove(self) -> None:
        """The workers let go of it with the next one."""


def write_weights(version: int, tensors: Mapping[str, Tensor], model: nn.Module) -> WeightsFile:
    """Writes every tensor of the model, a tied one under each of its names.

    vLLM keeps an old head when an update of a tied model brings only the embedding.

    Raises:
        EngineError: the tensors are not this model's.
    """
    by_name = {}
    for names, tensor in matched(model, tensors):
        for number, name in enumerate(names):
            by_name[name] = tensor.clone() if number else tensor.contiguous()
    room = (
        _MEMORY
        if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * sum(map(_bytes, by_name.values()))
        else None
    )
    directory = Path(tempfile.mkdtemp(prefix="sextet-weights-", dir=room))
    path = directory / f"{version}.safetensors"
    try:
        save_file(by_name, path)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return WeightsFile(version, str(path))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
