"""Schedule, clipping, and refusal of what is not finite."""

import math

import pytest
import torch
from torch import nn

from shared.config import OptimizerConfig
from shared.training.errors import CheckpointError, NonFiniteError
from shared.training.optimizer import Optimizer, learning_rate


def model() -> nn.Linear:
    linear = nn.Linear(3, 2)
    nn.init.ones_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def give_gradient(linear: nn.Linear, value: float) -> None:
    for p in linear.parameters():
        p.grad = torch.full_like(p, value)


def test_warm_up_is_counted_in_optimizer_steps_and_is_never_zero() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(step, config) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("schedule", "want"),
    [("linear", [1.0, 0.775, 0.55, 0.325, 0.1, 0.1]), ("cosine", [1.0, None, 0.55, None, 0.1, 0.1])],
)
def test_decay_starts_after_the_warm_up_and_ends_at_the_minimum(schedule: str, want: list[float | None]) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, total_steps=6, min_lr_ratio=0.1, schedule=schedule)
    got = [learning_rate(step, config) for step in range(2, 8)]
    assert all(a is None or b == pytest.approx(a) for a, b in zip(want, got, strict=True))
    if schedule == "cosine":
        assert got[1] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_the_step_takes_the_rate_of_its_number_and_reports_the_norm_before_clipping() -> None:
    linear = model()
    optimizer = Optimizer(linear, OptimizerConfig(lr=1e-3, warmup_steps=2, clip_grad=0.5))
    rates = []
    for _ in range(3):
        give_gradient(linear, 2.0)
        norm, rate = optimizer.step()
        rates.append(rate)
        assert norm == pytest.approx(2.0 * math.sqrt(8))
    assert rates == [5e-4, 1e-3, 1e-3]
    assert optimizer.steps == 3
    assert all(p.grad is None for p in linear.parameters())


def test_clipping_changes_the_moments() -> None:
    first_moments = []
    for clip in (0.0, 0.5):
        linear = model()
        optimizer = Optimizer(linear, OptimizerConfig(lr=1e-3, clip_grad=clip))
        give_gradient(linear, 2.0)
        optimizer.step()
        first_moments.append(float(optimizer.state()["exp_avg/weight"][0, 0]))
    assert first_moments[0] == pytest.approx(0.1 * 2.0)
    assert first_moments[1] == pytest.approx(0.1 * 2.0 * 0.5 / (2.0 * math.sqrt(8)), rel=1e-4)


def test_only_matrices_are_decayed() -> None:
    linear = model()
    nn.init.ones_(linear.bias)
    optimizer = Optimizer(linear, OptimizerConfig(lr=0.1, weight_decay=0.5))
    give_gradient(linear, 0.0)
    optimizer.step()
    assert torch.allclose(linear.weight, torch.full_like(linear.weight, 0.95))
    assert (linear.bias == 1).all()


def test_a_rate_of_zero_moves_nothing() -> None:
    linear = model()
    optimizer = Optimizer(linear, OptimizerConfig(lr=0.0, weight_decay=0.5))
    before = [p.clone() for p in linear.parameters()]
    for _ in range(3):
        give_gradient(linear, 1.0)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, linear.parameters(), strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_named(bad: float) -> None:
    linear = model()
    optimizer = Optimizer(linear, OptimizerConfig())
    give_gradient(linear, 1.0)
    optimizer.step()
    before, state = [p.clone() for p in linear.parameters()], {k: t.clone() for k, t in optimizer.state().items()}
    give_gradient(linear, 1.0)
    linear.bias.grad[1] = bad
    with pytest.raises(NonFiniteError, match="'bias' is not finite at optimizer step 2"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, linear.parameters(), strict=True))
    assert all(torch.equal(t, optimizer.state()[k]) for k, t in state.items())
    assert optimizer.steps == 1


def test_missing_state_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="no optimizer state although 3 optimizer steps"):
        Optimizer(model(), OptimizerConfig()).load_state({}, 3)


def test_a_parameter_without_a_gradient_has_moments_as_if_it_began_with_the_next_step() -> None:
    """An expert that no token chose, saved and loaded between two steps or not."""
    results, config = [], OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0)
    for between in (False, True):
        linear = model()
        optimizer = Optimizer(linear, config)
        linear.bias.grad = torch.ones(2)
        optimizer.step()
        assert torch.equal(linear.weight, torch.ones(2, 3))
        assert not optimizer.state()["exp_avg/weight"].any()
        if between:
            state, optimizer = optimizer.state(), Optimizer(linear, config)
            optimizer.load_state(state, 1)
        give_gradient(linear, 0.5)
        optimizer.step()
        results.append([*linear.parameters(), *optimizer.state().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # As torch's own, which begins with the first gradient.
    linear = model()
    adamw = torch.optim.AdamW([linear.weight], lr=1e-2, weight_decay=0.1)
    linear.weight.grad = torch.full_like(linear.weight, 0.5)
    adamw.step()
    assert torch.equal(results[0][0], linear.weight)


def test_incomplete_or_foreign_state_is_an_error_and_changes_nothing() -> None:
    linear = model()
    optimizer = Optimizer(linear, OptimizerConfig())
    give_gradient(linear, 1.0)
    optimizer.step()
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    with pytest.raises(CheckpointError, match=r"'weight' is incomplete"):
        optimizer.load_state({k: t for k, t in state.items() if k != "exp_avg_sq/weight"}, 1)
    with pytest.raises(CheckpointError, match=r"'exp_avg/other'.*does not belong"):
        optimizer.load_state({**state, "exp_avg/other": torch.zeros(1)}, 1)
    assert all(torch.equal(t, optimizer.state()[k]) for k, t in state.items())
