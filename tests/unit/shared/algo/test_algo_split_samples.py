"""A sample of several rows counts once in the statistics of its group, and all of its rows get its advantage."""

import math
import random
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from algo_batches import Batch, participants, random_batch, sampled
from test_algo_advantages import CASES, KL, OPTIONS, returns, row_values
from torch import Tensor

from shared.algo import ADVANTAGES, GROUPED_ADVANTAGES, AdvantageInputs, AdvantageOptions, token_rewards

PER_TOKEN = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline")
"""They give a sample more than one number; the last one compares within groups, and has a test of its own."""


def split_batch(seed: int) -> tuple[Batch, list[int]]:
    """Rows of three prompts, and the number of the sample that each is a part of: 1 to 6 rows."""
    batch, rng = random_batch(seed, n=7, failures=0.1), random.Random(seed)
    return batch, [10 * int(group) + rng.randrange(4) for group in batch.groups_B]


def whole(batch: Batch, samples: list[int]) -> tuple[Batch, dict[int, int]]:
    """The same as one row per sample: its rows' tokens one after the other, its score the mean of theirs.

    Returns also where the row of a sample is.
    """
    parts: dict[int, list[int]] = {}
    for row in participants(batch):
        parts.setdefault(samples[row], []).append(row)
    places = {sample: place for place, sample in enumerate(parts)}
    width = max(sum(len(sampled(batch, row)) for row in rows) for rows in parts.values())
    made: dict[str, Tensor] = {}
    for field in fields(batch):
        x = getattr(batch, field.name)
        if field.name.endswith("_BT"):
            made[field.name] = torch.zeros(len(parts), width, dtype=x.dtype)
            for sample, rows in parts.items():
                tokens = [x[row, t] for row in rows for t in sampled(batch, row)]
                made[field.name][places[sample], : len(tokens)] = torch.stack(tokens)
        elif x.dtype == torch.float64:
            means = [math.fsum(float(x[row]) for row in rows) / len(rows) for rows in parts.values()]
            made[field.name] = torch.tensor(means, dtype=torch.float64)
        else:
            made[field.name] = torch.stack([x[rows[0]] for rows in parts.values()])
    return Batch(**made), places


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", [case for case, (name, *_) in CASES.items() if name not in PER_TOKEN])
def test_every_row_gets_what_the_formula_gives_its_sample(case: str, seed: int) -> None:
    name, changes, reference = CASES[case]
    batch, samples = split_batch(seed)
    merged, places = whole(batch, samples)
    wanted = reference(merged)
    expected = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
    for row in participants(batch):
        expected[row, sampled(batch, row)] = wanted[places[samples[row]]][0]
    inputs = replace(batch.inputs(KL), samples_B=torch.tensor(samples))
    result = ADVANTAGES[name](inputs, replace(OPTIONS, **changes))
    torch.testing.assert_close(result.advantages_BT, expected, rtol=1e-9, atol=1e-9)
    counted_once = ADVANTAGES[name](merged.inputs(KL), replace(OPTIONS, **changes)).metrics
    assert result.metrics.get("rows_in_flat_groups") == counted_once.get("rows_in_flat_groups")


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_rows_that_reach_a_step_count_there_as_their_mean(seed: int, zero_tail: bool) -> None:
    batch, samples = split_batch(seed)
    options = replace(OPTIONS, extra={"zero_tail": float(zero_tail)})
    inputs = replace(batch.inputs(KL), samples_B=torch.tensor(samples))
    result = ADVANTAGES["optimal_token_baseline"](inputs, options)

    def energy(row: int, step: int) -> float:
        terms = [
            1 - 2 * math.exp(float(batch.old_logprobs_BT[row, t])) + float(batch.sum_pi_squared_BT[row, t])
            for t in sampled(batch, row)[: step + 1]
        ]
        return math.fsum(terms)

    def baseline(row: int, step: int) -> float:
        """Sum over samples of the mean of W G, over that of the mean of W."""
        there: dict[int, list[int]] = {}
        for other in participants(batch):
            if batch.groups_B[other] == batch.groups_B[row] and len(sampled(batch, other)) > step:
                there.setdefault(samples[other], []).append(other)
        if zero_tail and len(there) == 1:
            return 0.0

        def total(value: Sequence[float]) -> float:
            return math.fsum(value) / len(value)

        above = sum(total([energy(o, step) * returns(batch, o, 1.0)[step] for o in rows]) for rows in there.values())
        below = sum(total([energy(o, step) for o in rows]) for rows in there.values())
        return above / max(below, 1e-8)

    expected = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
    for row in participants(batch):
        group = {samples[o] for o in participants(batch) if batch.groups_B[o] == batch.groups_B[row]}
        for step, t in enumerate(sampled(batch, row)):
            own = returns(batch, row, 1.0)[step]
            expected[row, t] = own - baseline(row, step) if len(group) > 1 else 0.0
    torch.testing.assert_close(result.advantages_BT, expected, rtol=1e-9, atol=1e-9)


def split(scores: list[float], samples: list[int], groups: list[int]) -> AdvantageInputs:
    mask, scores_B = torch.ones(len(scores), 2).bool(), torch.tensor(scores, dtype=torch.float64)
    rewards, valid = token_rewards(scores_B, None, 0.0, mask), torch.ones(len(scores)).bool()
    return AdvantageInputs(scores_B, mask, valid, torch.tensor(groups), rewards, samples_B=torch.tensor(samples))


def test_hand_computed() -> None:
    """Two sessions, of one row and of three: the mean is 2, not 3."""
    inputs = split([0.0, 4.0, 4.0, 4.0], [7, 8, 8, 8], [0, 0, 0, 0])
    assert row_values("dr_grpo", inputs) == [-2.0, 2.0, 2.0, 2.0]
    half = 2**-0.5
    assert row_values("grpo", inputs) == pytest.approx([-half, half, half, half])
    assert row_values("rloo", inputs) == [-4.0, 4.0, 4.0, 4.0]
    assert row_values("opo", inputs) == [-3.0, 1.0, 1.0, 1.0]
    assert row_values("grpo_passk", inputs, normalize_std=False) == [0.0, 4.0, 4.0, 4.0]
    assert row_values("reinforce_plus_plus_baseline", inputs, whiten=False) == [-2.0, 2.0, 2.0, 2.0]


def test_hand_computed_parts_that_were_graded_apart() -> None:
    """A session of scores 1 and 3 is one of score 2; its part that was not graded is in no statistic."""
    inputs = split([6.0, 1.0, 3.0, 9.0], [0, 1, 1, 1], [0, 0, 0, 0])
    inputs = replace(inputs, valid_B=torch.tensor([True, True, True, False]))
    assert row_values("dr_grpo", inputs) == [2.0, -2.0, -2.0, 0.0]
    assert row_values("rloo", inputs) == [4.0, -4.0, -4.0, 0.0]


def test_hand_computed_gpg_counts_samples() -> None:
    """Of three samples, two have a signal, whatever their rows: alpha = 3 / 2."""
    inputs = split([1.0, 1.0, 0.0, 1.0], [0, 0, 1, 2], [0, 0, 0, 5])
    assert row_values("gpg", inputs) == [0.75, 0.75, -0.75, 0.0]


def test_a_session_of_two_rows_is_no_company_for_itself() -> None:
    inputs = split([1.0, 1.0, 0.0, 1.0], [0, 0, 1, 2], [0, 0, 5, 5])
    for name in ("grpo", "dr_grpo", "rloo", "opo", "grpo_passk"):
        assert row_values(name, inputs, eps=1e-6)[:2] == [0.0, 0.0]
    alone = split([1.0, 0.5], [0, 0], [0, 0])
    for name in sorted(GROUPED_ADVANTAGES - {"gdpo", "optimal_token_baseline"}):
        with pytest.raises(ValueError, match="at least two rows per prompt"):
            row_values(name, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_samples_of_one_row_are_bit_equal_to_rows(name: str, dtype: torch.dtype) -> None:
    for seed in range(6):
        batch = random_batch(seed)
        tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
        changed = {key: x.to(dtype) for key, x in tensors.items() if x.is_floating_point()}
        inputs = replace(batch, **changed).inputs(KL)
        own = torch.arange(len(batch.valid_B)).flip(0)
        plain = ADVANTAGES[name](inputs, AdvantageOptions())
        numbered = ADVANTAGES[name](replace(inputs, samples_B=own), AdvantageOptions())
        assert torch.equal(plain.advantages_BT, numbered.advantages_BT)
        assert plain.metrics == numbered.metrics
