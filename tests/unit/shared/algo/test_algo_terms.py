"""KL, entropy, value loss, masked statistics, aggregation and metrics against plain loops."""

import math
import statistics
from typing import get_args

import pytest
import torch
from algo_batches import participants, random_batch, sampled

from shared.algo import (
    MODES,
    REJECTIONS,
    AdaptiveKL,
    FixedKL,
    Totals,
    aggregate,
    combine_metrics,
    entropy_from_logits,
    finish_metrics,
    kl_estimate,
    log_ratio,
    masked_mean,
    masked_sum,
    masked_whiten,
    sum_pi_squared,
    value_loss,
)
from shared.config import CorrectionConfig, PolicyLossConfig

KL = {
    "k1": lambda x: (x, 1.0),
    "abs": lambda x: (abs(x), math.copysign(1.0, x)),
    "k2": lambda x: (x * x / 2, x),
    "k3": lambda x: (math.exp(-x) - 1 + x, 1 - math.exp(-x)),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"])
def test_kl_equals_its_formula_in_value_and_gradient(estimator: str, seed: int) -> None:
    batch = random_batch(seed)
    x = batch.logprobs_BT.clone().requires_grad_()
    kl = kl_estimate(x, batch.reference_logprobs_BT, batch.active_BT, estimator)
    kl.sum().backward()
    values, grads = torch.zeros_like(kl), torch.zeros_like(kl)
    for row in participants(batch):
        for t in sampled(batch, row):
            difference = float(batch.logprobs_BT[row, t] - batch.reference_logprobs_BT[row, t])
            values[row, t], grads[row, t] = KL[estimator.removesuffix("+")](difference)
            if estimator.endswith("+"):
                grads[row, t] = difference
    torch.testing.assert_close(kl.detach(), values, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(x.grad, grads, rtol=1e-10, atol=1e-12)


def test_verls_other_names_are_the_same_estimators() -> None:
    batch = random_batch(0)
    for other, name in {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"}.items():
        one, two = (
            kl_estimate(batch.logprobs_BT, batch.reference_logprobs_BT, batch.active_BT, n) for n in (other, name)
        )
        assert torch.equal(one, two)
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_estimate(batch.logprobs_BT, batch.reference_logprobs_BT, batch.active_BT, "k4")


def test_estimators_are_unbiased_and_only_the_straight_through_gradient_is() -> None:
    """Exact expectation over a vocabulary of 6: every token drawn with the policy's own probability."""
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0)
    p = torch.log_softmax(theta, 0)
    exact = (p.exp() * (p - q)).sum()
    (true_gradient,) = torch.autograd.grad(exact, theta, retain_graph=True)
    everywhere = torch.ones(6, dtype=torch.bool)
    for estimator in ("k1", "k3", "k1+", "k3+", "k2"):
        mean = (p.exp().detach() * kl_estimate(p, q, everywhere, estimator)).sum()
        (gradient,) = torch.autograd.grad(mean, theta, retain_graph=True)
        if estimator != "k2":
            assert mean.item() == pytest.approx(exact.item())
        if estimator in ("k2", "k1+", "k3+"):
            torch.testing.assert_close(gradient, true_gradient)
        else:
            assert not torch.allclose(gradient, true_gradient, rtol=1e-2)


def test_kl_controllers() -> None:
    assert FixedKL(0.1).update(99.0, 1000) == FixedKL(0.1)
    controller = AdaptiveKL(0.1, target=0.05, horizon=1000)
    assert controller.update(0.05, 100).coef == pytest.approx(0.1)
    assert controller.update(0.055, 100).coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert controller.update(5.0, 100).coef == pytest.approx(0.1 * 1.02)
    assert controller.update(0.0, 100).coef == pytest.approx(0.1 * 0.98)


def test_entropy_equals_its_formula() -> None:
    logits = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    entropy = entropy_from_logits(logits)
    for row, t in ((0, 0), (2, 3), (1, 2)):
        weights = [math.exp(x) for x in logits[row, t].tolist()]
        expected = -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)
        assert entropy[row, t].item() == pytest.approx(expected)
        squares = sum((w / sum(weights)) ** 2 for w in weights)
        assert sum_pi_squared(logits)[row, t].item() == pytest.approx(squares)
    assert torch.autograd.gradcheck(entropy_from_logits, logits)


def test_entropy_with_tokens_ruled_out() -> None:
    logits = torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64, requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("seed", range(4))
def test_value_loss_equals_its_formula(seed: int) -> None:
    batch = random_batch(seed)
    x = batch.values_BT.clone().requires_grad_()
    loss, metrics = value_loss(x, batch.old_values_BT, batch.returns_BT, batch.active_BT, 0.4)
    loss.sum().backward()
    values, grads, clipped = torch.zeros_like(loss), torch.zeros_like(loss), 0
    for row in participants(batch):
        for t in sampled(batch, row):
            v, old, goal = (float(y[row, t]) for y in (batch.values_BT, batch.old_values_BT, batch.returns_BT))
            near = min(max(v, old - 0.4), old + 0.4)
            plain, limited = (v - goal) ** 2, (near - goal) ** 2
            values[row, t] = 0.5 * max(plain, limited)
            grads[row, t] = v - goal if plain >= limited else 0.0
            clipped += limited > plain
    torch.testing.assert_close(loss.detach(), values)
    torch.testing.assert_close(x.grad, grads)
    assert float(metrics["clip_fraction_sum"]) == clipped


def test_masked_statistics_equal_the_library_of_statistics() -> None:
    batch = random_batch(6)
    x, mask = batch.values_BT, batch.active_BT
    flat = x[mask].tolist()
    assert float(masked_sum(x, mask)) == pytest.approx(sum(flat))
    assert float(masked_mean(x, mask)) == pytest.approx(statistics.fmean(flat))
    deviation = (statistics.variance(flat) + 1e-8) ** 0.5
    expected = [(v - statistics.fmean(flat)) / deviation for v in flat]
    assert masked_whiten(x, mask)[mask].tolist() == pytest.approx(expected)
    kept = [e + statistics.fmean(flat) for e in expected]
    assert masked_whiten(x, mask, shift_mean=False)[mask].tolist() == pytest.approx(kept)
    rows = [statistics.fmean(r) if (r := x[i][mask[i]].tolist()) else 0.0 for i in range(len(x))]
    assert masked_mean(x, mask, 1).tolist() == pytest.approx(rows)


@pytest.mark.parametrize("tokens", [0, 1])
def test_masked_statistics_of_nothing_and_of_one(tokens: int) -> None:
    x = torch.full((2, 3), 5.0)
    mask = torch.arange(6).reshape(2, 3) < tokens
    assert float(masked_mean(x, mask)) == 5.0 * tokens
    assert (masked_whiten(x, mask) == 0).all()


def test_log_ratio_is_float32_at_least_and_clamped() -> None:
    x, y = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16), torch.tensor([[-99.0, -2.5]], dtype=torch.bfloat16)
    ratio = log_ratio(x, y, torch.ones(1, 2, dtype=torch.bool))
    assert ratio.dtype == torch.float32
    assert ratio.tolist() == [[20.0, 0.5]]
    assert log_ratio(x.double(), y.double(), torch.ones(1, 2, dtype=torch.bool)).dtype == torch.float64


@pytest.mark.parametrize("seed", range(4))
def test_aggregation_equals_its_formula(seed: int) -> None:
    batch = random_batch(seed)
    totals = Totals.count(batch.mask_BT, batch.valid_B, norm_length=20)
    rows = [[float(batch.values_BT[row, t]) for t in sampled(batch, row)] for row in participants(batch)]
    assert totals == Totals(sum(map(len, rows)), len(rows), 20)
    expected = {
        "token-mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "token-sum": sum(map(sum, rows)),
        "seq-mean-token-sum": statistics.fmean(map(sum, rows)),
        "seq-mean-token-mean": statistics.fmean(sum(r) / len(r) for r in rows),
        "seq-mean-token-sum-norm": statistics.fmean(map(sum, rows)) / 20,
    }
    assert set(expected) == set(MODES)
    for mode, value in expected.items():
        assert float(aggregate(batch.values_BT, batch.mask_BT, batch.valid_B, mode, totals)) == pytest.approx(value)
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        aggregate(batch.values_BT, batch.mask_BT, batch.valid_B, "mean", totals)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_of_nothing_is_zero_with_a_gradient(mode: str) -> None:
    loss = torch.ones(2, 3, requires_grad=True)
    nothing, nobody = torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
    value = aggregate(loss * 2, nothing, nobody, mode, Totals.count(nothing, nobody))
    value.backward()
    assert value.item() == 0
    assert loss.grad is not None
    assert (loss.grad == 0).all()


def test_metrics_combine_by_their_suffix() -> None:
    parts = [
        {"a_sum": torch.tensor(3.0), "b_max": torch.tensor(1.0), "b_min": torch.tensor(0.5)},
        {"a_sum": torch.tensor(5.0), "b_max": torch.tensor(-math.inf), "b_min": torch.tensor(math.inf)},
    ]
    assert finish_metrics(combine_metrics(parts), Totals(4, 2)) == {"a": 2.0, "b_max": 1.0, "b_min": 0.5}
    assert finish_metrics(combine_metrics(parts), Totals(0, 0)) == {}
    with pytest.raises(ValueError, match="metric 'a' must end in"):
        combine_metrics([{"a": torch.tensor(1.0)}])


def test_the_configuration_knows_the_same_names() -> None:
    aggregation = PolicyLossConfig.model_fields["aggregation"].annotation
    assert set(get_args(aggregation)) == set(MODES)
    rejections = CorrectionConfig.model_fields["reject"].annotation
    assert set(get_args(rejections)) == {"none", *REJECTIONS}
