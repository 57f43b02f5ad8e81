"""Advantage estimators by name: what they are given, what they return, what they share.

An estimator sees the whole batch of a step at once: groups, baselines and whitening need all rows. Rows that are not
valid or have no sampled token take no part in any statistic and get advantage 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .groups import group_count, group_mean, group_sum, groups_with_signal, one_of_each
from .masking import active_mask, at_least_float32, blank, masked_sum, masked_whiten
from .registry import Registry


@dataclass(frozen=True)
class AdvantageInputs:
    """A step's batch. Padded on the right, response tokens only.

    Raises:
        ValueError: shapes or dtypes don't fit, or a row that takes part has a score that is not finite.
    """

    scores_B: Tensor
    """Outcome score of each row, as graded (no KL)."""
    mask_BT: Tensor
    """bool, True on tokens the policy sampled (False: padding, tool tokens)."""
    valid_B: Tensor
    """bool, False: the row takes no part (grade failed, empty response)."""
    groups_B: Tensor
    """int64, rows of the same prompt uid share a number."""
    token_rewards_BT: Tensor
    """From `rewards.token_rewards`: the score on the last sampled token, minus the KL penalty."""
    values_BT: Tensor | None = None
    """Value of the state BEFORE token t was emitted (GAE)."""
    score_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Named scores [B] (GDPO)."""
    baseline_scores_B: Tensor | None = None
    """Score of the greedy answer to the row's prompt (ReMax)."""
    old_logprobs_BT: Tensor | None = None
    """Log-probs of the sampled tokens (optimal token baseline)."""
    sum_pi_squared_BT: Tensor | None = None
    """Sum over the vocabulary of squared probabilities, `entropy.sum_pi_squared` (optimal token baseline)."""
    samples_B: Tensor | None = None
    """int64, rows of one sample share a number: a conversation may be several. None: every row is a sample."""

    def __post_init__(self) -> None:
        rows, shape = (self.mask_BT.shape[0],), tuple(self.mask_BT.shape)
        parts = {f"score_parts[{name!r}]": part for name, part in self.score_parts.items()}
        for name, value in {**vars(self), **parts}.items():
            if not isinstance(value, Tensor):
                continue
            expected = shape if name.endswith("_BT") else rows
            if tuple(value.shape) != expected:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, not {expected}")
        for name in ("mask_BT", "valid_B"):
            if getattr(self, name).dtype != torch.bool:
                raise ValueError(f"{name} is {getattr(self, name).dtype}, not torch.bool")
        self.require_finite("scores_B", self.scores_B)

    def require_finite(self, name: str, x_B: Tensor) -> None:
        """Raises ValueError when a row that takes part has NaN or infinity: a failed grade must be valid = false."""
        broken_B = self.taking_part_B & ~torch.isfinite(x_B)
        if broken_B.any():
            row = int(broken_B.nonzero()[0])
            raise ValueError(f"{name}[{row}] is {float(x_B[row])} but the row is valid: a failed grade is valid=False")

    @property
    def active_BT(self) -> Tensor:
        """bool, sampled tokens of valid rows."""
        return active_mask(self.mask_BT, self.valid_B)

    @property
    def taking_part_B(self) -> Tensor:
        """bool, valid rows with at least one sampled token."""
        return self.active_BT.any(1)

    @property
    def counted_B(self) -> Tensor:
        """bool, one row of each sample that takes part: statistics over samples are of these."""
        return self.one_of_each(self.taking_part_B)

    def one_of_each(self, part_B: Tensor) -> Tensor:
        """bool [B], of the rows `part_B` one of each sample."""
        return part_B if self.samples_B is None else one_of_each(part_B, self.samples_B)

    @property
    def outcomes_B(self) -> Tensor:
        """The sample's token rewards summed: its score, less its KL penalty if there is one.

        A sample of several rows has one score, their mean, and the penalties of all of them.
        """
        sums_B = masked_sum(self.token_rewards_BT, self.active_BT, 1)
        if self.samples_B is None:
            return sums_B
        part_B = self.taking_part_B
        more_B = group_count(part_B, self.samples_B) - 1
        whole_B = group_sum(sums_B, part_B, self.samples_B) - more_B * self.by_sample(self.scores_B)
        return blank(whole_B, part_B).to(sums_B.dtype)

    def by_sample(self, x_B: Tensor) -> Tensor:
        """`x_B`, for every row its mean over the sample's rows that take part."""
        return x_B if self.samples_B is None else group_mean(x_B, self.taking_part_B, self.samples_B).to(x_B.dtype)


@dataclass(frozen=True)
class AdvantageOptions:
    """Numbers of the estimators; an estimator reads only its own."""

    gamma: float = 1.0
    lam: float = 1.0
    normalize_std: bool = True
    """Divide by the group's standard deviation (GRPO's family)."""
    whiten: bool = True
    """Whiten over the batch where the method does (GAE, REINFORCE++, GDPO)."""
    eps: float = 1e-6
    """Added to a standard deviation before dividing (verl 1e-6, TRL 1e-4)."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of one estimator, checked against those it declared."""


@dataclass(frozen=True)
class Advantages:
    """Result of an estimator; tensors are 0 where nothing was sampled."""

    advantages_BT: Tensor
    returns_BT: Tensor | None
    """Targets of the value model (GAE only)."""
    metrics: dict[str, float]


Estimator = Callable[[AdvantageInputs, AdvantageOptions], Advantages]
ADVANTAGES: Registry[AdvantageInputs, AdvantageOptions, Advantages] = Registry("advantage estimator")
GROUPED_ADVANTAGES: set[str] = set()
"""Estimators that compare rows of one prompt, so need at least two."""


def register_advantage(name: str, grouped: bool = False, **defaults: float) -> Callable[[Estimator], Estimator]:
    """Enters an estimator under `name`: (inputs, options) -> Advantages.

    Args:
        name: as `algorithm.advantage` names it.
        grouped: it compares rows of one prompt.
        defaults: further numbers it reads from `options.extra`.
    """
    if grouped:
        GROUPED_ADVANTAGES.add(name)
    return ADVANTAGES.register(name, **defaults)


def advantage_estimator(name: str) -> Estimator:
    """The estimator registered as `name`; ValueError names the nearest one otherwise."""
    return ADVANTAGES.find(name)


def discounted_returns(rewards_BT: Tensor, active_BT: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G(next active token), 0 where not active."""
    rewards_BT = blank(rewards_BT, active_BT)
    returns_BT, running_B = torch.zeros_like(rewards_BT), rewards_BT.new_zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        running_B = torch.where(active_BT[:, t], rewards_BT[:, t] + gamma * running_B, running_B)
        returns_BT[:, t] = running_B
    return blank(returns_BT, active_BT)


def maybe_whiten(advantages_BT: Tensor, inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """Whitened over the batch's sampled tokens when `options.whiten`."""
    return masked_whiten(advantages_BT, inputs.active_BT) if options.whiten else advantages_BT


def spread(advantages_B: Tensor, inputs: AdvantageInputs) -> Tensor:
    """[B, T] the same advantage on every sampled token of a row, in the dtype of the token rewards."""
    advantages_B = advantages_B.to(at_least_float32(inputs.token_rewards_BT).dtype)
    return blank(advantages_B[:, None].expand(inputs.mask_BT.shape), inputs.active_BT)


def finish(advantages_BT: Tensor, inputs: AdvantageInputs, returns_BT: Tensor | None = None) -> Advantages:
    """The result with the metrics every estimator has."""
    part_B, tokens_N = inputs.taking_part_B, advantages_BT[inputs.active_BT]
    metrics = {"rows": float(part_B.sum()), "rows_left_out": float((~part_B).sum())}
    if part_B.any():
        metrics |= {
            "score_mean": float(inputs.scores_B[part_B].double().mean()),
            "advantage_mean": float(tokens_N.double().mean()),
            "advantage_max": float(tokens_N.max()),
            "advantage_min": float(tokens_N.min()),
        }
    counted_B = inputs.counted_B
    several_B = counted_B & (group_count(counted_B, inputs.groups_B) > 1)
    if several_B.any():
        signal_B = groups_with_signal(inputs.by_sample(inputs.scores_B), counted_B, inputs.groups_B)
        metrics["rows_in_flat_groups"] = float((~signal_B[several_B]).double().mean())
    return Advantages(advantages_BT, returns_BT, metrics)
