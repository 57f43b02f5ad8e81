"""float32, as training uses it, against float64; bfloat16 log-probs; and the same numbers on a GPU."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from algo_batches import Batch, random_batch
from torch import Tensor

from shared.algo import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdvantageOptions,
    CorrectionOptions,
    PolicyLossInputs,
    PolicyLossOptions,
    correct,
    entropy_from_logits,
    kl_estimate,
    policy_loss,
    select_tokens,
    uniform_noise,
    value_loss,
)

OPTIONS = CorrectionOptions("decoupled", token_cap=1.5, reject="seq_mean_k3", reject_threshold=0.2)


def converted(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    return replace(batch, **{f.name: change(getattr(batch, f.name)) for f in fields(batch)})


def everything(batch: Batch) -> dict[str, Any]:
    """Each function of the package on one batch, tensors by name."""
    out: dict[str, Any] = {}
    active, width = batch.active_BT, batch.mask_BT.shape[1]
    for name, estimator in ADVANTAGES.items():
        out[f"advantage {name}"] = estimator(batch.inputs(0.1), AdvantageOptions(gamma=0.9, lam=0.9)).advantages_BT
    fixed = correct(batch.old_logprobs_BT, batch.rollout_logprobs_BT, active, OPTIONS)
    out |= {"correction mask": fixed.mask_BT, "correction weights": fixed.weights_BT}
    noise = uniform_noise(batch.seeds_B, width)
    for name in POLICY_LOSSES:
        extra = {**POLICY_LOSSES.defaults[name]}
        selection = select_tokens(name, batch.old_logprobs_BT, batch.advantages_BT, active, noise, extra)
        inputs = PolicyLossInputs(
            batch.logprobs_BT, batch.old_logprobs_BT, batch.advantages_BT, active, fixed.weights_BT, selection
        )
        out[f"loss {name}"], metrics = policy_loss(name)(inputs, PolicyLossOptions(clip_ratio_c=3.0))
        out |= {
            f"loss {name} {key}": value.to(torch.float64) for key, value in metrics.items() if "fraction" not in key
        }
    for estimator in ("k1", "abs", "k2", "k3", "k3+"):
        out[f"kl {estimator}"] = kl_estimate(batch.logprobs_BT, batch.reference_logprobs_BT, active, estimator)
    out["value"] = value_loss(batch.values_BT, batch.old_values_BT, batch.returns_BT, active, 0.5)[0]
    logits = batch.values_BT[..., None] * torch.arange(4, device=active.device)
    out["entropy"] = entropy_from_logits(logits, active)
    return out


@pytest.mark.parametrize("seed", range(3))
def test_float32_follows_float64(seed: int) -> None:
    batch = random_batch(seed)
    wide, narrow = everything(batch), everything(converted(batch, lambda x: x.float() if x.is_floating_point() else x))
    for name, value in narrow.items():
        if value.is_floating_point() and value.ndim:
            assert value.dtype == torch.float32, name
        torch.testing.assert_close(value.double(), wide[name].double(), rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_half_precision_log_probs_are_widened_before_they_are_subtracted(name: str) -> None:
    batch = converted(random_batch(0), lambda x: x.bfloat16() if x.is_floating_point() else x)
    inputs = PolicyLossInputs(
        batch.logprobs_BT, batch.old_logprobs_BT, batch.advantages_BT, batch.active_BT, selection_BT=batch.mask_BT
    )
    loss, metrics = policy_loss(name)(inputs, PolicyLossOptions())
    assert loss.dtype == torch.float32
    exact = batch.logprobs_BT.double() - batch.old_logprobs_BT.double()
    expected = torch.where(batch.active_BT, -exact, 0.0).sum()
    torch.testing.assert_close(metrics["approx_kl_sum"].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_gives_the_same_numbers(seed: int) -> None:
    batch = random_batch(seed)
    here, there = everything(batch), everything(converted(batch, lambda x: x.cuda()))
    for name, value in there.items():
        assert value.is_cuda, name
        torch.testing.assert_close(value.cpu(), here[name], rtol=1e-9, atol=1e-9, msg=name)
