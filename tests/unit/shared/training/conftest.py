"""A tiny model on disk."""

from pathlib import Path

import pytest
import torch

from tests.fakes.tiny import write_tiny_llama

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
