"""Rewards per token, overlong shaping, truncated answers, groups with signal."""

import math

import pytest
import torch
from algo_batches import participants, random_batch, sampled

from shared.algo import groups_with_signal, handle_truncated, overlong_penalty, token_rewards


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_token_rewards_equal_their_formula(seed: int, coef: float) -> None:
    batch = random_batch(seed)
    kl = batch.logprobs_BT - batch.reference_logprobs_BT
    rewards = token_rewards(batch.scores_B, kl if coef else None, coef, batch.active_BT)
    expected = torch.zeros_like(rewards)
    for row in participants(batch):
        for t in sampled(batch, row):
            expected[row, t] = -coef * float(kl[row, t])
        expected[row, sampled(batch, row)[-1]] += float(batch.scores_B[row])
    torch.testing.assert_close(rewards, expected)


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (60, 0.0), (80, 0.0), (90, -0.5), (99, -0.95), (100, -1.0), (120, -1.0)]
)
def test_overlong_penalty_is_dapos(length: int, penalty: float) -> None:
    assert float(overlong_penalty(torch.tensor([length]), 100, 20)) == pytest.approx(penalty)
    assert float(overlong_penalty(torch.tensor([length]), 100, 20, 2.0)) == pytest.approx(2 * penalty)


@pytest.mark.parametrize("buffer", [0, 101])
def test_overlong_buffer_out_of_range_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"overlong_buffer is {buffer}; it must lie in 1..100"):
        overlong_penalty(torch.tensor([1]), 100, buffer)


def test_truncated_answers() -> None:
    scores, valid = torch.tensor([1.0, 2.0, math.nan]), torch.tensor([True, True, False])
    cut = torch.tensor([True, False, True])
    kept, rows = handle_truncated(scores, valid, cut, "keep")
    assert kept.tolist()[:2] == [1.0, 2.0]
    assert rows.tolist() == [True, True, False]
    zero, rows = handle_truncated(scores, valid, cut, "zero")
    assert zero.tolist()[:2] == [0.0, 2.0]
    assert rows.tolist() == [True, True, False]
    assert math.isnan(float(zero[2]))
    kept, rows = handle_truncated(scores, valid, cut, "mask")
    assert kept.tolist()[:2] == [1.0, 2.0]
    assert rows.tolist() == [False, True, False]
    with pytest.raises(ValueError, match="'drop'; known: keep, zero, mask"):
        handle_truncated(scores, valid, cut, "drop")


def test_groups_with_signal() -> None:
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, math.nan])
    part = torch.tensor([True, True, True, True, True, False])
    groups = torch.tensor([4, 4, 9, 9, 1, 4])
    assert groups_with_signal(scores, part, groups).tolist() == [False, False, True, True, False, False]
