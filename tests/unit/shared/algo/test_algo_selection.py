"""Selections made on the whole mini-batch, and the noise that decides them."""

import pytest
import torch
from algo_batches import Batch, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.algo import POLICY_LOSSES, select_tokens, uniform_noise

WIDE = {"clip_cov_ratio": 0.2, "clip_cov_lb": -0.5, "clip_cov_ub": 2.0, "kl_cov_ratio": 0.2}


def select(loss: str, batch: Batch) -> torch.Tensor:
    noise = uniform_noise(batch.seeds_B, batch.mask_BT.shape[1])
    chosen = select_tokens(loss, batch.logprobs_BT, batch.advantages_BT, batch.active_BT, noise, WIDE)
    assert chosen is not None
    return chosen


def covariances(batch: Batch) -> dict[tuple[int, int], float]:
    at = [tuple(x) for x in batch.active_BT.nonzero().tolist()]
    p, a = [float(batch.logprobs_BT[x]) for x in at], [float(batch.advantages_BT[x]) for x in at]
    mean_p, mean_a = sum(p) / len(p), sum(a) / len(a)
    return {x: (p[i] - mean_p) * (a[i] - mean_a) for i, x in enumerate(at)}


@pytest.mark.parametrize("seed", range(5))
def test_kl_cov_takes_the_highest_covariances(seed: int) -> None:
    batch = random_batch(seed)
    ranked = sorted(covariances(batch).items(), key=lambda item: -item[1])
    expected = {at for at, _ in ranked[: max(int(0.2 * len(ranked)), 1)]}
    assert {tuple(x) for x in select("kl_cov", batch).nonzero().tolist()} == expected


@pytest.mark.parametrize("seed", range(5))
def test_clip_cov_draws_from_the_band_by_the_rows_own_noise(seed: int) -> None:
    batch = random_batch(seed)
    values = covariances(batch)
    noise = uniform_noise(batch.seeds_B, batch.mask_BT.shape[1])
    band = sorted((at for at, x in values.items() if -0.5 < x < 2.0), key=lambda at: float(noise[at]))
    expected = set(band[: max(int(0.2 * len(values)), 1)])
    assert {tuple(x) for x in select("clip_cov", batch).nonzero().tolist()} == expected


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
@given(seed=st.integers(0, 10_000), tied=st.booleans())
@settings(max_examples=30, deadline=None)
def test_selection_does_not_depend_on_the_order_of_rows(loss: str, seed: int, tied: bool) -> None:
    batch = random_batch(seed)
    if tied:  # all covariances equal: only the noise decides
        batch.advantages_BT.fill_(0.0)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
    assert torch.equal(select(loss, batch)[order], select(loss, batch.take(order)))


def test_losses_without_a_selection_get_none() -> None:
    batch = random_batch(0)
    for loss in set(POLICY_LOSSES) - {"clip_cov", "kl_cov"}:
        assert select_tokens(loss, batch.logprobs_BT, batch.advantages_BT, batch.active_BT, batch.values_BT, {}) is None


def split_mix(seed: int, position: int) -> float:
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return ((z ^ (z >> 31)) >> 11) / 2**53


@given(seed=st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=50, deadline=None)
def test_noise_is_split_mix_64(seed: int) -> None:
    assert uniform_noise(torch.tensor([seed]), 5)[0].tolist() == [split_mix(seed % 2**64, t) for t in range(5)]


def test_noise_is_uniform_and_independent_of_the_width() -> None:
    seeds = torch.arange(200)
    noise = uniform_noise(seeds, 100)
    assert torch.equal(uniform_noise(seeds[7:9], 40), noise[7:9, :40])
    assert float(noise.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(noise.var()) == pytest.approx(1 / 12, abs=0.005)
    assert len(noise.unique()) == noise.numel()
