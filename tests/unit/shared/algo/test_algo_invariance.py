"""A whole update is the same number however its rows are ordered, padded, and split over micro-batches and replicas."""

from dataclasses import dataclass

import pytest
import torch
from algo_batches import Batch, random_batch
from torch import Tensor, nn

from shared.algo import (
    ADVANTAGES,
    MODES,
    POLICY_LOSSES,
    AdvantageOptions,
    CorrectionOptions,
    PolicyLossInputs,
    PolicyLossOptions,
    Totals,
    aggregate,
    combine_metrics,
    correct,
    entropy_from_logits,
    finish_metrics,
    kl_estimate,
    policy_loss,
    select_tokens,
    uniform_noise,
    value_loss,
)

EXTRA = {"clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}, "kl_cov": {"kl_cov_ratio": 0.1}}


class Model(nn.Module):
    """Log-probs, logits and values as smooth functions of a few parameters and the batch's own numbers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64) * 0.3)
        self.head = nn.Parameter(torch.randn(3, 5, generator=generator, dtype=torch.float64))

    def features(self, batch: Batch) -> Tensor:
        ones = torch.ones_like(batch.sum_pi_squared_BT)
        x = torch.stack([ones, batch.sum_pi_squared_BT, batch.returns_BT], -1)
        return torch.where(batch.active_BT[..., None], x, 0.0)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        features = self.features(batch)
        return batch.old_logprobs_BT + 0.3 * torch.tanh(features @ self.w), features @ self.head, features @ self.w


@dataclass(frozen=True)
class Prepared:
    """A mini-batch with all that is decided before it is split."""

    batch: Batch
    advantages_BT: Tensor
    mask_BT: Tensor
    weights_BT: Tensor | None
    selection_BT: Tensor | None

    def part(self, rows: list[int]) -> "Prepared":
        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows][:, : narrow.mask_BT.shape[1]]

        narrow = self.batch.take(rows).narrow()
        advantages, mask = cut(self.advantages_BT), cut(self.mask_BT)
        assert advantages is not None
        assert mask is not None
        return Prepared(narrow, advantages, mask, cut(self.weights_BT), cut(self.selection_BT))


def prepare(batch: Batch, loss: str, estimator: str) -> Prepared:
    advantages = ADVANTAGES[estimator](batch.inputs(0.1), AdvantageOptions(gamma=0.9, lam=0.9))
    options = CorrectionOptions("decoupled", token_cap=1.2, reject="token_k3", reject_threshold=0.1)
    fixed = correct(batch.old_logprobs_BT, batch.rollout_logprobs_BT, batch.active_BT, options)
    noise = uniform_noise(batch.seeds_B, batch.mask_BT.shape[1])
    extra = {**POLICY_LOSSES.defaults[loss], **EXTRA.get(loss, {})}
    selection = select_tokens(loss, fixed.old_logprobs_BT, advantages.advantages_BT, fixed.mask_BT, noise, extra)
    return Prepared(batch, advantages.advantages_BT, fixed.mask_BT, fixed.weights_BT, selection)


def share(model: Model, part: Prepared, loss: str, mode: str, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of policy loss, KL loss, entropy bonus and value loss."""
    batch, mask = part.batch, part.mask_BT
    logprobs, logits, values = model(batch)
    inputs = PolicyLossInputs(
        logprobs, batch.old_logprobs_BT, part.advantages_BT, mask, part.weights_BT, part.selection_BT
    )
    extra = EXTRA.get(loss, {})
    policy, metrics = policy_loss(loss)(inputs, PolicyLossOptions(clip_ratio_high=0.1, extra=extra))
    kl = kl_estimate(logprobs, batch.reference_logprobs_BT, mask, "k3")
    entropy = entropy_from_logits(logits, mask)
    critic, critic_metrics = value_loss(values, batch.old_values_BT, batch.returns_BT, mask, 0.5)
    loss_BT = policy + 0.1 * kl - 0.01 * entropy + 0.5 * critic
    return aggregate(loss_BT, mask, batch.valid_B, mode, totals), {**metrics, **critic_metrics}


def update(parts: list[Prepared], loss: str, mode: str, totals: Totals) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient and metrics of one optimizer step: shares are summed, nothing else."""
    model, total, metrics = Model(), torch.zeros((), dtype=torch.float64), []
    for part in parts:
        value, sums = share(model, part, loss, mode, totals)
        value.backward()
        total, metrics = total + value.detach(), [*metrics, sums]
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return total, gradient, finish_metrics(combine_metrics(metrics), totals)


def same(one: tuple[Tensor, Tensor, dict[str, float]], other: tuple[Tensor, Tensor, dict[str, float]]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=1e-9, atol=1e-12)
    assert one[2] == pytest.approx(other[2], rel=1e-9, abs=1e-12)


def chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def by_tokens(batch: Batch, limit: int) -> list[list[int]]:
    """Micro-batches of at most `limit` tokens (or one row), longest first."""
    lengths = batch.active_BT.sum(1).tolist()
    out: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        if out[-1] and sum(lengths[r] for r in out[-1]) + lengths[row] > limit:
            out.append([])
        out[-1].append(row)
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_update_does_not_depend_on_the_split(loss: str, mode: str) -> None:
    whole = prepare(random_batch(11), loss, "grpo")
    totals = Totals.count(whole.mask_BT, whole.batch.valid_B, 16)
    expected = update([whole], loss, mode, totals)
    assert expected[1].abs().sum() > 0
    rows = list(range(12))
    for size in (1, 2, 4):
        same(update([whole.part(c) for c in chunks(rows, size)], loss, mode, totals), expected)
    same(update([whole.part(c) for c in by_tokens(whole.batch, 9)], loss, mode, totals), expected)


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
@pytest.mark.parametrize("loss", ["ppo", "clip_cov", "kl_cov", "gspo"])
def test_update_does_not_depend_on_the_order_of_rows(loss: str, estimator: str) -> None:
    batch = random_batch(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3)).tolist()
    one, other = prepare(batch, loss, estimator), prepare(batch.take(order), loss, estimator)
    totals = Totals.count(one.mask_BT, batch.valid_B, 16)
    assert totals == Totals.count(other.mask_BT, other.batch.valid_B, 16)
    torch.testing.assert_close(other.advantages_BT, one.advantages_BT[order], rtol=1e-9, atol=1e-12)
    same(update([other], loss, "token-mean", totals), update([one], loss, "token-mean", totals))


@pytest.mark.parametrize("mode", MODES)
def test_update_does_not_depend_on_replicas(mode: str) -> None:
    """Unequal shards whose counts are added up, each in micro-batches of its own size, gradients summed."""
    whole = prepare(random_batch(13), "ppo", "rloo")
    shards = [[0, 5, 7], [1, 2, 3, 4, 6, 8, 9], [10, 11]]
    parts = [whole.part(shard) for shard in shards]
    totals = Totals.add([Totals.count(part.mask_BT, part.batch.valid_B, 16) for part in parts])
    assert totals == Totals.count(whole.mask_BT, whole.batch.valid_B, 16)
    micro = [whole.part(c) for shard, size in zip(shards, (2, 3, 1), strict=True) for c in chunks(shard, size)]
    same(update(micro, "ppo", mode, totals), update([whole], "ppo", mode, totals))


def test_counting_each_micro_batch_by_itself_would_be_wrong() -> None:
    """The proof that the tests above can fail: denominators of the part give another gradient."""
    whole = prepare(random_batch(11), "ppo", "grpo")
    parts = [whole.part(c) for c in chunks(list(range(12)), 4)]
    local = [Totals.count(part.mask_BT, part.batch.valid_B) for part in parts]
    model = Model()
    for part, totals in zip(parts, local, strict=True):
        (share(model, part, "ppo", "token-mean", totals)[0] / len(parts)).backward()
    expected = update([whole], "ppo", "token-mean", Totals.count(whole.mask_BT, whole.batch.valid_B))
    assert model.head.grad is not None
    assert not torch.allclose(model.head.grad.flatten(), expected[1][3:], rtol=1e-3)
