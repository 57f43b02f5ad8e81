"""Operations of a pass, counted by hand and by torch."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shared.config import ModelConfig
from shared.training.flops import Work, peak_flops
from shared.training.microbatch import row_totals
from shared.training.models import load_policy, load_value_model
from shared.training.sequences import collate, row_lengths
from tests.unit.shared.training.test_training_engine import CPU
from tests.unit.shared.training.test_training_logprobs import make_block


def test_matrices_are_counted_as_torch_counts_them(tiny_llama: Path) -> None:
    """One row, so that nothing is padded; torch counts attention over the whole square, which is left out here."""
    block, policy = make_block(lengths=((5, 7),)), load_policy(ModelConfig(path=str(tiny_llama)))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        policy(collate(block, CPU), 1.0)
    counts = counter.get_flop_counts()["Global"]
    matrices = sum(count for kind, count in counts.items() if "attention" not in str(kind) and "bmm" not in str(kind))
    # 4 operations for each of 4 x 8 channels in 2 layers and each pair in a triangle of 12 positions.
    attention = 4 * (4 * 8) * 2 * 12 * 13 / 2
    assert Work(policy).forward([12], 7) == matrices + attention


def test_a_value_head_costs_next_to_nothing(tiny_llama: Path) -> None:
    block = make_block()
    totals, responses = list(row_totals(block).values()), int(row_lengths(block)[1].sum())
    policy, values = (load(ModelConfig(path=str(tiny_llama))) for load in (load_policy, load_value_model))
    difference = Work(policy).forward(totals, responses) - Work(values).forward(totals, responses)
    assert difference == 2 * responses * (64 * 32 - 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_cpu_could_do_is_not_known(dtype: torch.dtype) -> None:
    assert peak_flops(CPU, dtype) is None
