"""Rollout correction against plain loops."""

import math
import statistics
from typing import Any

import pytest
import torch
from algo_batches import Batch, participants, random_batch, sampled

from shared.algo import REJECTIONS, CorrectionOptions, correct, mismatch_metrics


def ratios(batch: Batch) -> dict[int, list[float]]:
    """log(p_actor / p_rollout) of each sampled token."""
    actor, rollout = batch.old_logprobs_BT, batch.rollout_logprobs_BT
    return {row: [float(actor[row, t] - rollout[row, t]) for t in sampled(batch, row)] for row in participants(batch)}


def run(batch: Batch, **options: Any):
    return correct(batch.old_logprobs_BT, batch.rollout_logprobs_BT, batch.active_BT, CorrectionOptions(**options))


def dense(batch: Batch, rows: dict[int, list[float]]) -> torch.Tensor:
    out = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
    for row, values in rows.items():
        out[row, sampled(batch, row)] = torch.tensor(values, dtype=torch.float64)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_weights_equal_their_formulas(seed: int) -> None:
    batch = random_batch(seed)
    logs = ratios(batch)
    token = {row: [min(math.exp(x), 1.2) for x in xs] for row, xs in logs.items()}
    sequence = {row: [min(math.exp(sum(xs)), 1.2)] * len(xs) for row, xs in logs.items()}
    icepop = {row: [math.exp(x) if 0.8 <= math.exp(x) <= 1.25 else 0.0 for x in xs] for row, xs in logs.items()}
    for options, expected in (
        ({"token_cap": 1.2}, token),
        ({"sequence_cap": 1.2}, sequence),
        ({"token_bounds": (0.8, 1.25)}, icepop),
    ):
        result = run(batch, mode="decoupled", **options)
        assert result.weights_BT is not None
        torch.testing.assert_close(result.weights_BT, dense(batch, expected))
        assert torch.equal(result.mask_BT, batch.active_BT)
        assert torch.equal(result.old_logprobs_BT.nan_to_num(), batch.old_logprobs_BT.nan_to_num())
        flat = [w for ws in expected.values() for w in ws]
        assert result.metrics["weight_mean"] == pytest.approx(statistics.fmean(flat))
        share = sum(flat) ** 2 / (len(flat) * sum(w * w for w in flat))
        assert result.metrics["weight_ess"] == pytest.approx(share)
    cut = sum(not 0.8 <= math.exp(x) <= 1.25 for xs in logs.values() for x in xs)
    assert result.metrics["weight_cut_fraction"] == pytest.approx(cut / sum(map(len, logs.values())))


ESTIMATORS = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("reject", REJECTIONS)
def test_rejection_equals_its_formula(reject: str, seed: int) -> None:
    batch = random_batch(seed)
    level, _, estimator = reject.rpartition("_")
    threshold = 1.15 if estimator == "k1" else 0.03
    result = run(batch, mode="decoupled", reject=reject, reject_threshold=threshold)
    expected: dict[int, list[float]] = {}
    for row, logs in ratios(batch).items():
        each = [ESTIMATORS[estimator](x) for x in logs]
        if level != "token":
            each = [{"seq_sum": sum, "seq_mean": statistics.fmean, "seq_max": max}[level](each)] * len(each)
        limit = math.log(threshold) if estimator == "k1" else threshold
        expected[row] = [float(abs(x) <= limit) for x in each]
    kept = dense(batch, expected).bool()
    assert torch.equal(result.mask_BT, kept)
    assert result.weights_BT is None
    share = 1 - float(kept.sum()) / float(batch.active_BT.sum())
    assert result.metrics["rejected_fraction"] == pytest.approx(share)


@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_their_formulas(seed: int) -> None:
    batch = random_batch(seed)
    logs = ratios(batch)
    flat = [x for xs in logs.values() for x in xs]
    weights = [math.exp(x) for x in flat]
    expected = {
        "kl": -statistics.fmean(flat),
        "k3_kl": statistics.fmean(math.exp(x) - 1 - x for x in flat),
        "logprob_abs_difference": statistics.fmean(map(abs, flat)),
        "logprob_abs_difference_max": max(map(abs, flat)),
        "ppl_ratio": statistics.fmean(math.exp(-statistics.fmean(xs)) for xs in logs.values()),
        "chi2_token": statistics.fmean(w * w for w in weights) - 1,
        "chi2_seq": statistics.fmean(math.exp(2 * sum(xs)) for xs in logs.values()) - 1,
        "ess": sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)),
    }
    assert mismatch_metrics(batch.old_logprobs_BT, batch.rollout_logprobs_BT, batch.active_BT) == pytest.approx(
        expected
    )


def test_kl_metrics_estimate_the_divergence_they_name() -> None:
    """Exact expectation: a batch in which every token occurs as often as the rollout samples it."""
    counts = torch.tensor([5, 3, 2])
    rollout = (counts / counts.sum()).double().log().repeat_interleave(counts)[None]
    actor = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log().repeat_interleave(counts)[None]
    metrics = mismatch_metrics(actor, rollout, torch.ones(1, 10, dtype=torch.bool))
    exact = sum(p * math.log(p / q) for p, q in zip((0.5, 0.3, 0.2), (0.3, 0.3, 0.4), strict=True))
    chi2 = sum(q * q / p for p, q in zip((0.5, 0.3, 0.2), (0.3, 0.3, 0.4), strict=True)) - 1
    assert metrics["kl"] == pytest.approx(exact)
    assert metrics["k3_kl"] == pytest.approx(exact)
    assert metrics["chi2_token"] == pytest.approx(chi2)


def test_bypass_takes_the_rollouts_log_probs_and_none_only_measures() -> None:
    batch = random_batch(1).junk(0.0)
    bypass = correct(None, batch.rollout_logprobs_BT, batch.active_BT, CorrectionOptions("bypass"))
    assert torch.equal(bypass.old_logprobs_BT, batch.rollout_logprobs_BT)
    assert bypass.weights_BT is None
    measured = run(batch, mode="none")
    assert torch.equal(measured.old_logprobs_BT, batch.old_logprobs_BT)
    assert measured.weights_BT is None
    assert measured.metrics["k3_kl"] > 0
    rejecting = run(batch, mode="bypass", reject="token_k3", reject_threshold=0.03)
    assert torch.equal(rejecting.old_logprobs_BT, batch.rollout_logprobs_BT)
    assert rejecting.mask_BT.sum() < batch.active_BT.sum()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "on"}, "unknown correction mode 'on'"),
        ({"mode": "decoupled", "token_cap": 2.0, "token_bounds": (0.5, 2.0)}, "both token_cap and token_bounds"),
        ({"mode": "bypass", "token_cap": 2.0}, "correction.token_cap needs mode 'decoupled'"),
        ({"mode": "decoupled", "reject": "k3"}, "unknown rejection 'k3'"),
        ({"mode": "decoupled", "reject": "seq_mean_k3"}, "needs reject_threshold"),
        ({"mode": "decoupled", "reject": "token_k1", "reject_threshold": 0.5}, "reject_threshold > 1.0, not 0.5"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CorrectionOptions(**options)


def test_missing_log_probs_are_refused() -> None:
    batch = random_batch(1)
    for options in (CorrectionOptions("decoupled"), CorrectionOptions("bypass", reject="token_k2", reject_threshold=1)):
        with pytest.raises(ValueError, match="needs the actor's log-probs"):
            correct(None, batch.rollout_logprobs_BT, batch.active_BT, options)
