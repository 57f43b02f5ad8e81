"""Random ragged batches for the tests of shared/algo: float64, junk at every masked position, tool tokens inside."""

import random
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from shared.algo import AdvantageInputs, token_rewards

JUNK = (float("nan"), float("inf"), float("-inf"), 1e30)


@dataclass(frozen=True)
class Batch:
    """Every field has rows first; `_BT` is padded on the right."""

    scores_B: Tensor
    accuracy_B: Tensor
    format_B: Tensor
    baseline_scores_B: Tensor
    valid_B: Tensor
    groups_B: Tensor
    seeds_B: Tensor
    mask_BT: Tensor
    values_BT: Tensor
    old_values_BT: Tensor
    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    rollout_logprobs_BT: Tensor
    reference_logprobs_BT: Tensor
    sum_pi_squared_BT: Tensor
    advantages_BT: Tensor
    returns_BT: Tensor

    @property
    def active_BT(self) -> Tensor:
        return self.mask_BT & self.valid_B[:, None]

    def take(self, rows: list[int]) -> "Batch":
        """These rows, in this order."""
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def narrow(self) -> "Batch":
        """Padded no wider than the longest row needs."""
        ends = self.mask_BT.any(0).nonzero()
        width = int(ends[-1]) + 1 if len(ends) else 1
        return replace(self, **{f.name: getattr(self, f.name)[:, :width] for f in fields(self) if "_BT" in f.name})

    def junk(self, value: float) -> "Batch":
        """The same batch with `value` at every position that is not active, and as score of rows that take no part."""
        changed: dict[str, Tensor] = {}
        for f in fields(self):
            x = getattr(self, f.name)
            if x.dtype == torch.float64:
                keep = self.active_BT if f.name.endswith("_BT") else self.active_BT.any(1)
                changed[f.name] = torch.where(keep, x, torch.tensor(value, dtype=x.dtype))
        return replace(self, **changed)

    def inputs(self, gamma_kl: float = 0.0) -> AdvantageInputs:
        """For the estimators; `gamma_kl` puts that much of a KL penalty into the rewards."""
        kl_BT = self.old_logprobs_BT - self.reference_logprobs_BT if gamma_kl else None
        return AdvantageInputs(
            scores_B=self.scores_B,
            mask_BT=self.mask_BT,
            valid_B=self.valid_B,
            groups_B=self.groups_B,
            token_rewards_BT=token_rewards(self.scores_B, kl_BT, gamma_kl, self.active_BT),
            values_BT=self.values_BT,
            score_parts={"accuracy": self.accuracy_B, "format": self.format_B},
            baseline_scores_B=self.baseline_scores_B,
            old_logprobs_BT=self.old_logprobs_BT,
            sum_pi_squared_BT=self.sum_pi_squared_BT,
        )


def random_batch(seed: int, prompts: int = 3, n: int = 4, width: int = 7, failures: float = 0.15) -> Batch:
    """`prompts * n` rows, some invalid, some without a sampled token, some with tool tokens; rows shuffled."""
    rng = random.Random(seed)
    rows = prompts * n
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row in range(rows):
        length = 0 if rng.random() < failures else rng.randint(1, width)
        for t in range(length):
            mask[row, t] = rng.random() > 0.25
    order = rng.sample(range(rows), rows)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -normal(rows, width).abs() - 0.05
    scores = (normal(rows) * 2).round() / 2
    batch = Batch(
        scores_B=scores,
        accuracy_B=(normal(rows) > 0).double(),
        format_B=normal(rows),
        baseline_scores_B=normal(rows),
        valid_B=torch.tensor([rng.random() > failures for _ in range(rows)]),
        groups_B=torch.tensor([order.index(row) // n * 7 + 3 for row in range(rows)]),
        seeds_B=torch.tensor([rng.getrandbits(62) for _ in range(rows)]),
        mask_BT=mask,
        values_BT=normal(rows, width),
        old_values_BT=normal(rows, width),
        logprobs_BT=old + 0.4 * normal(rows, width),
        old_logprobs_BT=old,
        rollout_logprobs_BT=old + 0.3 * normal(rows, width),
        reference_logprobs_BT=old + 0.5 * normal(rows, width),
        sum_pi_squared_BT=torch.rand(rows, width, generator=generator, dtype=torch.float64),
        advantages_BT=normal(rows, width),
        returns_BT=normal(rows, width),
    )
    return batch.junk(rng.choice(JUNK))


def sampled(batch: Batch, row: int) -> list[int]:
    """Positions of the row's active tokens, in order."""
    return [t for t, active in enumerate(batch.active_BT[row].tolist()) if active]


def participants(batch: Batch) -> list[int]:
    """Rows that take part."""
    return [row for row in range(len(batch.valid_B)) if sampled(batch, row)]


def members(batch: Batch, row: int) -> list[int]:
    """Rows of the same prompt that take part."""
    return [other for other in participants(batch) if int(batch.groups_B[other]) == int(batch.groups_B[row])]
