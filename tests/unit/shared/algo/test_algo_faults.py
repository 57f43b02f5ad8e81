"""Kinds of faults reported against other trainers, one test each."""

import math
from dataclasses import replace

import pytest
import torch
from algo_batches import random_batch, sampled

from shared.algo import (
    ADVANTAGES,
    MODES,
    POLICY_LOSSES,
    AdvantageInputs,
    AdvantageOptions,
    PolicyLossInputs,
    PolicyLossOptions,
    Totals,
    aggregate,
    groups_with_signal,
    kl_estimate,
    policy_loss,
    token_rewards,
)

RAW = AdvantageOptions(whiten=False)


def test_reward_of_an_empty_response_is_not_written_before_the_first_token() -> None:
    """Index -1 of an empty row is the last column (or the prompt's last slot), where others keep its score."""
    mask = torch.tensor([[False, False, False], [True, True, False]])
    rewards = token_rewards(torch.tensor([5.0, 1.0]), None, 0.0, mask)
    assert rewards.tolist() == [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def test_values_one_position_off_are_noticed() -> None:
    """A perfect critic, values of the state BEFORE each token, leaves no advantage; shifted by one it does."""
    gamma, length = 0.9, 4
    mask = torch.ones(1, length, dtype=torch.bool)
    score = torch.tensor([2.0], dtype=torch.float64)
    before = torch.tensor([[2.0 * gamma ** (length - 1 - t) for t in range(length)]], dtype=torch.float64)
    inputs = AdvantageInputs(
        score, mask, mask[:, 0], torch.zeros(1).long(), token_rewards(score, None, 0.0, mask), values_BT=before
    )
    options = replace(RAW, gamma=gamma, lam=0.95)
    result = ADVANTAGES["gae"](inputs, options)
    assert result.advantages_BT.abs().max() < 1e-12
    assert result.returns_BT is not None
    torch.testing.assert_close(result.returns_BT, before)
    shifted = replace(inputs, values_BT=torch.roll(before, 1, 1))
    assert ADVANTAGES["gae"](shifted, options).advantages_BT.abs().max() > 0.1


def test_loss_is_scaled_by_tokens_not_samples_under_gradient_accumulation() -> None:
    """Two micro-batches, 1 token and 3 tokens: the mean over four tokens, not the mean of two means."""
    loss = torch.tensor([[4.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    valid = torch.ones(2, dtype=torch.bool)
    totals = Totals.add([Totals.count(mask[i : i + 1], valid[i : i + 1]) for i in range(2)])
    shares = [aggregate(loss[i : i + 1], mask[i : i + 1], valid[i : i + 1], "token-mean", totals) for i in range(2)]
    assert float(sum(shares)) == 10 / 4 != (4 + 2) / 2


@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_are_in_neither_numerator_nor_denominator(mode: str) -> None:
    loss = torch.tensor([[1.0, 100.0, 3.0], [100.0, 100.0, 100.0]])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    valid = torch.tensor([True, False])
    totals = Totals.count(mask, valid, norm_length=4)
    expected = {"token-mean": 2.0, "token-sum": 4.0, "seq-mean-token-sum": 4.0, "seq-mean-token-mean": 2.0}
    assert float(aggregate(loss, mask, valid, mode, totals)) == expected.get(mode, 1.0)


@pytest.mark.parametrize("difference", [1e3, -1e3, 1e30, -1e30])
def test_kl_does_not_overflow_in_exp(difference: float) -> None:
    for estimator in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
        x = torch.zeros(1, 1, requires_grad=True)
        kl = kl_estimate(x, torch.full((1, 1), difference), torch.ones(1, 1).bool(), estimator)
        kl.sum().backward()
        assert torch.isfinite(kl).all()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("difference", [1e3, -1e3])
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_no_loss_overflows_in_exp(name: str, difference: float) -> None:
    old = torch.full((1, 2), -1001.0)
    x = (old + difference).clamp(max=0).requires_grad_()
    mask = torch.ones(1, 2).bool()
    inputs = PolicyLossInputs(x, old, torch.tensor([[1.0, -1.0]]), mask, selection_BT=mask)
    loss, metrics = policy_loss(name)(inputs, PolicyLossOptions())
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "opo", "gpg", "grpo_passk"])
def test_a_failed_grade_is_not_a_wrong_answer(name: str) -> None:
    """The row whose grader failed moves no baseline: not as 0, not as NaN."""

    def advantages(scores: list[float], valid: list[bool]) -> list[float]:
        mask = torch.ones(len(scores), 1, dtype=torch.bool)
        scores_B = torch.tensor(scores, dtype=torch.float64)
        rewards = token_rewards(scores_B, None, 0.0, mask)
        inputs = AdvantageInputs(scores_B, mask, torch.tensor(valid), torch.zeros(len(scores)).long(), rewards)
        return ADVANTAGES[name](inputs, AdvantageOptions()).advantages_BT[:, 0].tolist()

    three = advantages([1.0, 0.5, 0.0], [True] * 3)
    assert advantages([1.0, 0.5, 0.0, math.nan], [True] * 3 + [False]) == pytest.approx([*three, 0.0])
    assert advantages([1.0, 0.5, 0.0, 0.0], [True] * 3 + [False]) == pytest.approx([*three, 0.0])
    with pytest.raises(ValueError, match="a failed grade is valid=False"):
        advantages([1.0, 0.5, 0.0, math.nan], [True] * 4)


@pytest.mark.parametrize("mode", MODES)
def test_a_filter_that_leaves_a_short_batch_keeps_the_loss_scale(mode: str) -> None:
    """Rows dropped by the dynamic filter: the loss of the rest is that of a batch that never held them."""
    batch = random_batch(21)
    flat = batch.groups_B == batch.groups_B[0]
    batch = replace(batch, scores_B=torch.where(flat, torch.ones_like(batch.scores_B), batch.scores_B))
    kept = groups_with_signal(batch.scores_B, batch.active_BT.any(1), batch.groups_B)
    assert 0 < kept.sum() < batch.active_BT.any(1).sum()
    masked = aggregate(
        batch.values_BT, batch.mask_BT, batch.valid_B & kept, mode, Totals.count(batch.mask_BT, batch.valid_B & kept, 9)
    )
    rest = batch.take(kept.nonzero().squeeze(1).tolist())
    alone = aggregate(rest.values_BT, rest.mask_BT, rest.valid_B, mode, Totals.count(rest.mask_BT, rest.valid_B, 9))
    torch.testing.assert_close(masked, alone)


def test_a_terminal_reward_survives_a_masked_last_token() -> None:
    """The response ends in a tool's answer: the score lies on the last token the policy sampled."""
    mask = torch.tensor([[True, True, False, False, True, False, False]])
    rewards = token_rewards(torch.tensor([3.0]), torch.zeros(1, 7), 0.1, mask)
    assert rewards.tolist() == [[0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax"])
def test_a_terminal_reward_reaches_the_turns_before_a_tools_answer(name: str) -> None:
    mask = torch.tensor([[True, False, False, True]])
    scores = torch.tensor([1.0], dtype=torch.float64)
    inputs = AdvantageInputs(
        scores,
        mask,
        torch.tensor([True]),
        torch.tensor([0]),
        token_rewards(scores, None, 0.0, mask),
        values_BT=torch.zeros(1, 4, dtype=torch.float64),
        baseline_scores_B=torch.zeros(1, dtype=torch.float64),
    )
    assert ADVANTAGES[name](inputs, RAW).advantages_BT.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_padding_that_equals_the_end_token_does_not_mask_the_real_end_token() -> None:
    """Masks are by position: the same ids with the mask of their lengths keep the real end token's loss and reward."""
    end = 2
    ids = torch.tensor([[5, 7, end, end, end], [5, end, 7, end, end]])
    lengths = torch.tensor([3, 4])
    mask = torch.arange(5) < lengths[:, None]
    rewards = token_rewards(torch.ones(2), None, 0.0, mask)
    assert rewards.nonzero().tolist() == [[0, 2], [1, 3]]
    assert (ids[mask & (rewards > 0)] == end).all()
    logprobs = torch.full((2, 5), -1.0, requires_grad=True)
    loss, _ = policy_loss("reinforce")(
        PolicyLossInputs(logprobs, logprobs.detach(), torch.ones(2, 5), mask), PolicyLossOptions()
    )
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == [-1.0, -1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"cross_entropy", "dro", "sapo"}))
def test_the_first_update_has_ratio_one_at_any_temperature(name: str, temperature: float) -> None:
    """Every policy-gradient loss then has the gradient -A of log p, and PPO's clip cuts nothing."""
    logits = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ids = torch.randint(6, (2, 3, 1))
    x = torch.log_softmax(logits / temperature, -1).gather(2, ids).squeeze(2)
    x.retain_grad()
    advantages = torch.tensor([[0.5] * 3, [-2.0] * 3])
    mask = torch.ones(2, 3).bool()
    inputs = PolicyLossInputs(x, x.detach().clone(), advantages, mask, selection_BT=~mask)
    loss, metrics = policy_loss(name)(inputs, PolicyLossOptions())
    loss.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, -advantages)
    assert float(metrics["ratio_max"]) == float(metrics["ratio_min"]) == 1.0
    assert float(metrics["approx_kl_k3_sum"]) == 0.0
    assert float(metrics.get("clip_fraction_sum", torch.zeros(()))) == 0.0


def test_groups_belong_to_the_prompt_not_to_the_position() -> None:
    """Rows of one prompt scattered over the batch are compared with each other, wherever they stand."""
    batch = random_batch(8, failures=0.0)
    advantages = ADVANTAGES["rloo"](batch.inputs(), AdvantageOptions()).advantages_BT
    for row in range(12):
        if not sampled(batch, row):
            continue
        others = [
            float(batch.scores_B[other])
            for other in range(12)
            if other != row and batch.groups_B[other] == batch.groups_B[row] and sampled(batch, other)
        ]
        expected = float(batch.scores_B[row]) - sum(others) / len(others)
        assert float(advantages[row, sampled(batch, row)[0]]) == pytest.approx(expected)
