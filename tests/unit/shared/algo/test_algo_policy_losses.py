"""Every policy loss, value and gradient, against a plain loop over Python floats, written from the formula."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from algo_batches import Batch, random_batch, sampled

from shared.algo import POLICY_LOSSES, PolicyLossInputs, PolicyLossOptions, policy_loss

Token = tuple[float, float]
"""loss, and the gradient of the map's sum with respect to the token's log-prob"""
OPTIONS = PolicyLossOptions(clip_ratio_low=0.2, clip_ratio_high=0.3)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def clipped(ratio: float, a: float) -> Token:
    plain, limited = -a * ratio, -a * clip(ratio, 0.8, 1.3)
    return (plain, -a * ratio) if plain >= limited else (limited, 0.0)


def ppo(p: float, q: float, a: float, chosen: bool) -> Token:
    return clipped(math.exp(p - q), a)


def dual(p: float, q: float, a: float, chosen: bool) -> Token:
    loss, grad = ppo(p, q, a, chosen)
    return (-a * 1.5, 0.0) if a < 0 and loss > -a * 1.5 else (loss, grad)


def sapo(p: float, q: float, a: float, chosen: bool) -> Token:
    tau = 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (math.exp(p - q) - 1)))
    return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * math.exp(p - q)


def cispo(p: float, q: float, a: float, chosen: bool) -> Token:
    weight = clip(math.exp(p - q), 0.8, 1.3)
    return -weight * a * p, -weight * a


def dppo_tv(p: float, q: float, a: float, chosen: bool) -> Token:
    moved = math.exp(p) - math.exp(q)
    outside = moved > 0.3 if a > 0 else moved < -0.2
    weight = 0.0 if outside else min(math.exp(p - q), 20.0)
    return -weight * a * p, -weight * a


def dppo_kl(p: float, q: float, a: float, chosen: bool) -> Token:
    new, old = math.exp(p), math.exp(q)
    others = max(1 - old, 1e-8), max(1 - new, 1e-8)
    divergence = old * math.log(old / new) + (1 - old) * math.log(others[0] / others[1])
    outside = (new > old and divergence > 0.3) if a > 0 else (new < old and divergence > 0.2)
    weight = 0.0 if outside else min(math.exp(p - q), 20.0)
    return -weight * a * p, -weight * a


def kl_cov(p: float, q: float, a: float, chosen: bool) -> Token:
    ratio = math.exp(p - q)
    sign = math.copysign(1.0, p - q)
    return -a * ratio + chosen * 2.0 * abs(p - q), -a * ratio + chosen * 2.0 * sign


TOKEN_CASES: dict[str, tuple[str, PolicyLossOptions, Callable[[float, float, float, bool], Token]]] = {
    "ppo": ("ppo", OPTIONS, ppo),
    "ppo_dual_clip": ("ppo", replace(OPTIONS, clip_ratio_c=1.5), dual),
    "sapo": ("sapo", OPTIONS, sapo),
    "cispo": ("cispo", OPTIONS, cispo),
    "dppo_tv": ("dppo_tv", OPTIONS, dppo_tv),
    "dppo_kl": ("dppo_kl", OPTIONS, dppo_kl),
    "clip_cov": ("clip_cov", OPTIONS, lambda p, q, a, c: (0.0, 0.0) if c else ppo(p, q, a, c)),
    "kl_cov": ("kl_cov", replace(OPTIONS, extra={"ppo_kl_coef": 2.0}), kl_cov),
    "gpg": ("gpg", OPTIONS, lambda p, q, a, c: (-a * p, -a)),
    "reinforce": ("reinforce", OPTIONS, lambda p, q, a, c: (-a * p, -a)),
    "importance_sampling": (
        "importance_sampling",
        OPTIONS,
        lambda p, q, a, c: (-a * math.exp(p - q), -a * math.exp(p - q)),
    ),
    "cross_entropy": ("cross_entropy", OPTIONS, lambda p, q, a, c: (-p, -1.0)),
    "dro": (
        "dro",
        replace(OPTIONS, extra={"beta": 0.7}),
        lambda p, q, a, c: (-a * p + 0.35 * (p - q) ** 2, -a + 0.7 * (p - q)),
    ),
}


def row_gspo(p: list[float], q: list[float], a: list[float]) -> list[Token]:
    ratio = math.exp(sum(x - y for x, y in zip(p, q, strict=True)) / len(p))
    return [clipped(ratio, advantage) for advantage in a]


def row_geo_mean(p: list[float], q: list[float], a: list[float]) -> list[Token]:
    logs = [x - y for x, y in zip(p, q, strict=True)]
    limited = [clip(x, -0.2, 0.3) for x in logs]
    used = [min(x, y) if adv >= 0 else max(x, y) for x, y, adv in zip(logs, limited, a, strict=True)]
    loss = -sum(a) / len(a) * math.exp(sum(used) / len(used))
    return [(loss, loss if u == x else 0.0) for u, x in zip(used, logs, strict=True)]


ROW_CASES = {"gspo": row_gspo, "geo_mean": row_geo_mean}


def loss_inputs(batch: Batch, weighted: bool = False) -> PolicyLossInputs:
    weights = (0.5 + batch.rollout_logprobs_BT.exp()) if weighted else None
    return PolicyLossInputs(
        batch.logprobs_BT.clone().requires_grad_(),
        batch.old_logprobs_BT,
        batch.advantages_BT,
        batch.active_BT,
        weights,
        selection_BT=batch.returns_BT > 0.3,
    )


def check(name: str, options: PolicyLossOptions, inputs: PolicyLossInputs, expected: dict[tuple[int, int], Token]):
    loss, _ = policy_loss(name)(inputs, options)
    loss.sum().backward()
    losses, grads = torch.zeros_like(loss), torch.zeros_like(loss)
    for (row, t), (value, grad) in expected.items():
        weight = float(inputs.rollout_weights_BT[row, t]) if inputs.rollout_weights_BT is not None else 1.0
        losses[row, t], grads[row, t] = value * weight, grad * weight
    torch.testing.assert_close(loss, losses, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(inputs.logprobs_BT.grad, grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("case", TOKEN_CASES)
def test_token_loss_equals_its_formula(case: str, seed: int, weighted: bool) -> None:
    name, options, formula = TOKEN_CASES[case]
    batch = random_batch(seed)
    inputs = loss_inputs(batch, weighted)
    expected = {
        (row, t): formula(
            float(batch.logprobs_BT[row, t]),
            float(batch.old_logprobs_BT[row, t]),
            float(batch.advantages_BT[row, t]),
            bool(batch.returns_BT[row, t] > 0.3),
        )
        for row in range(len(batch.valid_B))
        for t in sampled(batch, row)
    }
    check(name, options, inputs, expected)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ROW_CASES)
def test_sequence_loss_equals_its_formula(name: str, seed: int) -> None:
    batch = random_batch(seed)
    expected: dict[tuple[int, int], Token] = {}
    for row in range(len(batch.valid_B)):
        positions = sampled(batch, row)
        if positions:
            columns = [
                x[row, positions].tolist() for x in (batch.logprobs_BT, batch.old_logprobs_BT, batch.advantages_BT)
            ]
            tokens = ROW_CASES[name](*columns)
            expected |= {(row, t): token for t, token in zip(positions, tokens, strict=True)}
    check(name, OPTIONS, loss_inputs(batch), expected)


def test_every_registered_loss_has_a_reference() -> None:
    assert {name for name, _, _ in TOKEN_CASES.values()} | set(ROW_CASES) == set(POLICY_LOSSES)


SMOOTH = ("sapo", "importance_sampling", "reinforce", "gpg", "cross_entropy", "dro", "ppo", "geo_mean", "kl_cov")


@pytest.mark.parametrize("name", SMOOTH)
def test_gradcheck_where_the_gradient_is_the_derivative(name: str) -> None:
    """Not the losses with a stop-gradient in them: their gradient is not the derivative of their value."""
    batch = random_batch(5, prompts=2, n=2, width=4)
    inputs = loss_inputs(batch)
    clean = torch.where(batch.active_BT, batch.logprobs_BT, 0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(name)(replace(inputs, logprobs_BT=x), OPTIONS)[0], clean)


def test_gspo_aggregates_to_the_gradient_of_the_sequence_form() -> None:
    """mean over rows of -A s with s = exp(mean log r), differentiated as it stands."""
    batch = random_batch(2, failures=0.0)
    rows = [row for row in range(12) if sampled(batch, row)]
    batch = batch.take(rows)
    advantages = batch.advantages_BT[:, :1].nan_to_num(0, 0, 0).clamp(-1, 1).expand(batch.mask_BT.shape).contiguous()
    wide = PolicyLossOptions(clip_ratio_low=0.99, clip_ratio_high=50.0)
    x = batch.logprobs_BT.clone().requires_grad_()
    loss, _ = policy_loss("gspo")(PolicyLossInputs(x, batch.old_logprobs_BT, advantages, batch.active_BT), wide)
    lengths = batch.active_BT.sum(1)
    (loss.sum(1) / lengths).mean().backward()
    y = batch.logprobs_BT.clone().requires_grad_()
    mean_log_ratio = torch.where(batch.active_BT, y - batch.old_logprobs_BT, 0.0).sum(1) / lengths
    (-advantages[:, 0] * mean_log_ratio.exp()).mean().backward()
    torch.testing.assert_close(x.grad, y.grad)


def hand(name: str, ratio: float, advantage: float, **options: Any) -> float:
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    inputs = PolicyLossInputs(
        old + math.log(ratio), old, torch.full_like(old, advantage), torch.ones(1, 1, dtype=torch.bool)
    )
    return float(policy_loss(name)(inputs, PolicyLossOptions(**options))[0])


def test_hand_computed_ppo() -> None:
    assert hand("ppo", 1.5, 2.0) == pytest.approx(-2.4)
    assert hand("ppo", 1.5, 2.0, clip_ratio_high=0.28) == pytest.approx(-2.56)
    assert hand("ppo", 0.5, 2.0) == pytest.approx(-1.0)
    assert hand("ppo", 0.5, -2.0) == pytest.approx(1.6)
    assert hand("ppo", 5.0, -2.0) == pytest.approx(10.0)
    assert hand("ppo", 5.0, -2.0, clip_ratio_c=3.0) == pytest.approx(6.0)
    assert hand("ppo", 2.0, -2.0, clip_ratio_c=3.0) == pytest.approx(4.0)


def test_hand_computed_others() -> None:
    assert hand("sapo", 1.0, 1.0) == pytest.approx(-2.0)
    assert hand("cispo", 1.5, 1.0) == pytest.approx(-1.2 * (math.log(1.5) - 1))
    assert hand("geo_mean", math.exp(0.5), 1.0) == pytest.approx(-math.exp(0.2))
    assert hand("gspo", 1.5, 1.0) == pytest.approx(-1.2)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_metrics_of_a_part_without_tokens_are_neutral(name: str) -> None:
    batch = random_batch(0)
    inputs = replace(loss_inputs(batch), mask_BT=torch.zeros_like(batch.mask_BT))
    loss, metrics = policy_loss(name)(inputs, OPTIONS)
    loss.sum().backward()
    assert (loss == 0).all()
    assert (inputs.logprobs_BT.grad == 0).all()
    assert all(float(value) == 0 for key, value in metrics.items() if key.endswith("_sum"))
    assert float(metrics["ratio_max"]) == -math.inf


def test_dual_clip_below_one_and_missing_selection_are_refused() -> None:
    inputs = loss_inputs(random_batch(0))
    with pytest.raises(ValueError, match="bound above 1"):
        policy_loss("ppo")(inputs, PolicyLossOptions(clip_ratio_c=0.9))
    for name in ("clip_cov", "kl_cov"):
        with pytest.raises(ValueError, match="select_tokens"):
            policy_loss(name)(replace(inputs, selection_BT=None), PolicyLossOptions())


def test_metrics_equal_plain_counts() -> None:
    batch = random_batch(4)
    _, metrics = policy_loss("ppo")(loss_inputs(batch), OPTIONS)
    tokens = [(row, t) for row in range(12) for t in sampled(batch, row)]
    ratios = [math.exp(float(batch.logprobs_BT[at] - batch.old_logprobs_BT[at])) for at in tokens]
    advantages = [float(batch.advantages_BT[at]) for at in tokens]
    cut = sum((r > 1.3 and a > 0) or (r < 0.8 and a < 0) for r, a in zip(ratios, advantages, strict=True))
    assert float(metrics["clip_fraction_sum"]) == cut > 0
    assert float(metrics["ratio_max"]) == pytest.approx(max(ratios))
    assert float(metrics["ratio_min"]) == pytest.approx(min(ratios))
    assert float(metrics["ratio_sum"]) == pytest.approx(sum(ratios))
    assert float(metrics["approx_kl_sum"]) == pytest.approx(-sum(map(math.log, ratios)))
    assert float(metrics["approx_kl_k3_sum"]) == pytest.approx(sum(r - 1 - math.log(r) for r in ratios))
