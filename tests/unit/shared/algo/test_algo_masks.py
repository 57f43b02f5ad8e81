"""What is masked changes nothing; rows that take no part change no neighbour. Property tests."""

from dataclasses import replace

import pytest
import torch
from algo_batches import JUNK, Batch, participants, random_batch, sampled
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.algo import (
    ADVANTAGES,
    GROUPED_ADVANTAGES,
    POLICY_LOSSES,
    AdvantageOptions,
    CorrectionOptions,
    PolicyLossInputs,
    PolicyLossOptions,
    Totals,
    aggregate,
    correct,
    entropy_from_logits,
    kl_estimate,
    mismatch_metrics,
    policy_loss,
    value_loss,
)

QUICK = settings(max_examples=30, deadline=None)
seeds, junk = st.integers(0, 10_000), st.sampled_from(JUNK)
OPTIONS = AdvantageOptions(gamma=0.95, lam=0.9)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(seed=seeds, value=junk)
@QUICK
def test_junk_changes_no_advantage(name: str, seed: int, value: float) -> None:
    batch = random_batch(seed)
    one = ADVANTAGES[name](batch.junk(0.0).inputs(0.2), OPTIONS)
    other = ADVANTAGES[name](batch.junk(value).inputs(0.2), OPTIONS)
    assert torch.equal(one.advantages_BT, other.advantages_BT)
    assert one.metrics == other.metrics
    assert (one.advantages_BT[~batch.active_BT] == 0).all()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@given(seed=seeds, value=junk)
@QUICK
def test_junk_changes_no_loss_and_no_gradient(name: str, seed: int, value: float) -> None:
    def run(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        x = batch.logprobs_BT.clone().requires_grad_()
        weights = batch.rollout_logprobs_BT.exp()
        inputs = PolicyLossInputs(
            x, batch.old_logprobs_BT, batch.advantages_BT, batch.active_BT, weights, batch.valid_B[:, None].expand_as(x)
        )
        loss_BT, metrics = policy_loss(name)(inputs, PolicyLossOptions(clip_ratio_c=3.0))
        totals = Totals.count(batch.mask_BT, batch.valid_B)
        loss = aggregate(loss_BT, batch.mask_BT, batch.valid_B, "token-mean", totals)
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad, metrics

    batch = random_batch(seed)
    clean, dirty = run(batch.junk(0.0)), run(batch.junk(value))
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert (dirty[1][~batch.active_BT] == 0).all()
    assert clean[2] == dirty[2]


@given(seed=seeds, value=junk)
@QUICK
def test_junk_changes_no_kl_value_loss_or_correction(seed: int, value: float) -> None:
    def run(batch: Batch) -> list[torch.Tensor]:
        x, v = batch.logprobs_BT.clone().requires_grad_(), batch.values_BT.clone().requires_grad_()
        active, total = batch.active_BT, torch.zeros((), dtype=torch.float64)
        for estimator in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
            total = total + kl_estimate(x, batch.reference_logprobs_BT, active, estimator).sum()
        loss_BT, sums = value_loss(v, batch.old_values_BT, batch.returns_BT, active, 0.5)
        (total + loss_BT.sum()).backward()
        options = CorrectionOptions("decoupled", sequence_cap=1.5, reject="seq_mean_k1", reject_threshold=1.4)
        fixed = correct(batch.old_logprobs_BT, batch.rollout_logprobs_BT, active, options)
        assert x.grad is not None
        assert v.grad is not None
        assert fixed.weights_BT is not None
        numbers = torch.tensor(list(fixed.metrics.values()), dtype=torch.float64)
        return [
            total.detach(),
            x.grad,
            v.grad,
            loss_BT.detach(),
            fixed.mask_BT,
            fixed.weights_BT,
            numbers,
            *sums.values(),
        ]

    batch = random_batch(seed)
    for clean, dirty in zip(run(batch.junk(0.0)), run(batch.junk(value)), strict=True):
        assert torch.equal(clean, dirty)


@given(seed=seeds, value=junk)
@QUICK
def test_junk_logits_change_no_entropy_and_no_gradient(seed: int, value: float) -> None:
    batch = random_batch(seed)
    logits = torch.randn(*batch.mask_BT.shape, 5, dtype=torch.float64)
    logits[~batch.active_BT] = value
    logits.requires_grad_()
    entropy = entropy_from_logits(logits, batch.active_BT)
    entropy.sum().backward()
    assert torch.isfinite(entropy).all()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~batch.active_BT] == 0).all()


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(seed=seeds)
@QUICK
def test_rows_that_take_no_part_change_no_neighbour(name: str, seed: int) -> None:
    """Removing them from the batch gives the others the same advantages."""
    batch = random_batch(seed)
    rows = participants(batch)
    if not rows or (name in GROUPED_ADVANTAGES and max(batch.groups_B[rows].bincount()) < 2):
        return
    whole = ADVANTAGES[name](batch.inputs(0.1), OPTIONS).advantages_BT
    alone = ADVANTAGES[name](batch.take(rows).inputs(0.1), OPTIONS).advantages_BT
    torch.testing.assert_close(whole[rows], alone, rtol=1e-10, atol=1e-10)
    assert (whole[[row for row in range(12) if row not in rows]] == 0).all()


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(seed=seeds)
@QUICK
def test_tool_tokens_and_padding_shift_nothing(name: str, seed: int) -> None:
    """Squeezing masked positions out of every row gives each sampled token the same advantage."""
    batch = random_batch(seed)
    order = torch.argsort((~batch.active_BT).int(), dim=1, stable=True)
    squeezed = replace(
        batch,
        **{
            name: getattr(batch, name).gather(1, order)
            for name in vars(batch)
            if name.endswith("_BT") and name != "active_BT"
        },
    )
    one = ADVANTAGES[name](batch.inputs(0.1), OPTIONS).advantages_BT
    other = ADVANTAGES[name](squeezed.inputs(0.1), OPTIONS).advantages_BT
    torch.testing.assert_close(one.gather(1, order), other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", sorted(GROUPED_ADVANTAGES - {"gdpo"}))
@given(seed=seeds, shift=st.floats(-50, 50))
@QUICK
def test_group_estimators_ignore_a_constant_added_to_a_group(name: str, seed: int, shift: float) -> None:
    batch = random_batch(seed)
    if name == "optimal_token_baseline":  # the tail that one row alone reaches has baseline 0 by default
        options = replace(OPTIONS, extra={"zero_tail": 0.0})
        batch = replace(batch, sum_pi_squared_BT=batch.sum_pi_squared_BT + 1.5)
    else:
        options = OPTIONS
    moved = replace(batch, scores_B=batch.scores_B + shift * (batch.groups_B == 3))
    one = ADVANTAGES[name](batch.inputs(), options).advantages_BT
    other = ADVANTAGES[name](moved.inputs(), options).advantages_BT
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg"])
@given(seed=seeds)
@QUICK
def test_advantages_of_a_group_sum_to_zero(name: str, seed: int) -> None:
    batch = random_batch(seed)
    result = ADVANTAGES[name](batch.inputs(), OPTIONS).advantages_BT
    firsts = {row: float(result[row, sampled(batch, row)[0]]) for row in participants(batch)}
    for group in set(batch.groups_B.tolist()):
        assert sum(a for row, a in firsts.items() if batch.groups_B[row] == group) == pytest.approx(0, abs=1e-8)


@given(seed=seeds)
@QUICK
def test_whitened_advantages_have_mean_zero_and_variance_one(seed: int) -> None:
    batch = random_batch(seed)
    values = ADVANTAGES["gae"](batch.inputs(), OPTIONS).advantages_BT[batch.active_BT]
    if len(values) > 1:
        assert float(values.mean()) == pytest.approx(0, abs=1e-9)
        assert float(values.var()) == pytest.approx(1, abs=1e-5)


@given(seed=seeds)
@QUICK
def test_mismatch_metrics_are_zero_between_equals_and_distances_otherwise(seed: int) -> None:
    batch = random_batch(seed)
    if not batch.active_BT.any():
        return
    same = mismatch_metrics(batch.old_logprobs_BT, batch.old_logprobs_BT, batch.active_BT)
    expected = {name: float(name in ("ess", "ppl_ratio")) for name in same}
    assert same == pytest.approx(expected, abs=1e-12)
    other = mismatch_metrics(batch.old_logprobs_BT, batch.rollout_logprobs_BT, batch.active_BT)
    assert other["k3_kl"] >= 0
    assert 0 < other["ess"] <= 1 + 1e-12
