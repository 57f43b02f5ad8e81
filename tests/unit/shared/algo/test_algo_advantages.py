"""Every estimator against a plain loop over Python floats, written from the formula."""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from algo_batches import Batch, members, participants, random_batch, sampled

from shared.algo import ADVANTAGES, GROUPED_ADVANTAGES, AdvantageInputs, AdvantageOptions, token_rewards

Rows = dict[int, list[float]]
"""row -> one number for each of its sampled tokens."""
OPTIONS = AdvantageOptions(gamma=0.9, lam=0.8)
KL = 0.3


def rewards_of(batch: Batch, row: int) -> list[float]:
    """Token rewards of one row: KL penalty everywhere, the score on the last sampled token."""
    positions = sampled(batch, row)
    out = [-KL * (float(batch.old_logprobs_BT[row, t]) - float(batch.reference_logprobs_BT[row, t])) for t in positions]
    out[-1] += float(batch.scores_B[row])
    return out


def outcome(batch: Batch, row: int) -> float:
    return sum(rewards_of(batch, row))


def whole_row(batch: Batch, value: Callable[[int], float]) -> Rows:
    return {row: [value(row)] * len(sampled(batch, row)) for row in participants(batch)}


def whitened(rows: Rows) -> Rows:
    flat = [x for xs in rows.values() for x in xs]
    mean = statistics.fmean(flat)
    deviation = (sum((x - mean) ** 2 for x in flat) / max(len(flat) - 1, 1) + 1e-8) ** 0.5
    return {row: [(x - mean) / deviation for x in xs] for row, xs in rows.items()}


def centred(batch: Batch, row: int, value: Callable[[int], float]) -> float:
    group = [value(other) for other in members(batch, row)]
    return value(row) - statistics.fmean(group) if len(group) > 1 else 0.0


def spread_of(batch: Batch, row: int, value: Callable[[int], float]) -> float:
    group = [value(other) for other in members(batch, row)]
    return (statistics.stdev(group) if len(group) > 1 else 0.0) + OPTIONS.eps


def reference_gae(batch: Batch) -> Rows:
    out: Rows = {}
    for row in participants(batch):
        rewards, values = rewards_of(batch, row), [float(batch.values_BT[row, t]) for t in sampled(batch, row)]
        deltas = [
            rewards[i] + OPTIONS.gamma * (values[i + 1] if i + 1 < len(values) else 0.0) - values[i]
            for i in range(len(values))
        ]
        decay = OPTIONS.gamma * OPTIONS.lam
        out[row] = [sum(decay ** (j - i) * deltas[j] for j in range(i, len(deltas))) for i in range(len(deltas))]
    return whitened(out)


def returns(batch: Batch, row: int, gamma: float) -> list[float]:
    rewards = rewards_of(batch, row)
    return [sum(gamma ** (j - i) * rewards[j] for j in range(i, len(rewards))) for i in range(len(rewards))]


def reference_opo(batch: Batch, row: int) -> float:
    group = members(batch, row)
    if len(group) < 2:
        return 0.0
    lengths = {other: len(sampled(batch, other)) for other in group}
    return outcome(batch, row) - sum(lengths[o] * outcome(batch, o) for o in group) / sum(lengths.values())


def reference_gpg(batch: Batch) -> Rows:
    everyone = participants(batch)
    flat = [row for row in everyone if len({outcome(batch, other) for other in members(batch, row)}) == 1]
    alpha = len(everyone) / max(len(everyone) - len(flat), 1)
    return whole_row(batch, lambda row: alpha * centred(batch, row, lambda r: outcome(batch, r)))


def reference_passk(batch: Batch, row: int, k: int) -> float:
    group = members(batch, row)
    if len(group) < 2:
        return 0.0
    others = [outcome(batch, other) for other in group if other != row]
    size = min(k, len(group)) - 1
    leads = [max(outcome(batch, row) - max(subset), 0.0) for subset in itertools.combinations(others, size)]
    return statistics.fmean(leads) / spread_of(batch, row, lambda r: outcome(batch, r))


def reference_gdpo(batch: Batch, weights: dict[str, float], by_token: bool) -> Rows:
    scores = {"accuracy": batch.accuracy_B, "format": batch.format_B}

    def normalised(name: str, row: int) -> float:
        return centred(batch, row, lambda r: float(scores[name][r])) / spread_of(
            batch, row, lambda r: float(scores[name][r])
        )

    def total(row: int) -> float:
        return sum(weights[name] * normalised(name, row) for name in scores)

    if by_token:
        return whitened(whole_row(batch, total))
    totals = {row: total(row) for row in participants(batch)}
    mean, deviation = statistics.fmean(totals.values()), statistics.stdev(totals.values())
    return whole_row(batch, lambda row: (totals[row] - mean) / (deviation + OPTIONS.eps))


def reference_optimal_baseline(batch: Batch, zero_tail: bool) -> Rows:
    def energies(row: int) -> list[float]:
        steps = [
            1 - 2 * 2.718281828459045 ** float(batch.old_logprobs_BT[row, t]) + float(batch.sum_pi_squared_BT[row, t])
            for t in sampled(batch, row)
        ]
        return list(itertools.accumulate(steps))

    out: Rows = {}
    for row in participants(batch):
        group, own = members(batch, row), returns(batch, row, 1.0)
        out[row] = []
        for step in range(len(own)):
            there = [other for other in group if len(sampled(batch, other)) > step]
            weights = [energies(other)[step] for other in there]
            goals = [returns(batch, other, 1.0)[step] for other in there]
            baseline = sum(w * g for w, g in zip(weights, goals, strict=True)) / max(sum(weights), 1e-8)
            alone = zero_tail and len(there) == 1
            out[row].append(0.0 if len(group) < 2 else own[step] - (0.0 if alone else baseline))
    return out


def outcome_centred(batch: Batch, row: int) -> float:
    return centred(batch, row, lambda r: outcome(batch, r))


def outcome_spread(batch: Batch, row: int) -> float:
    return spread_of(batch, row, lambda r: outcome(batch, r))


def batch_deviation(batch: Batch) -> float:
    return statistics.stdev(outcome(batch, row) for row in participants(batch)) + OPTIONS.eps


def others_mean(batch: Batch, row: int) -> float:
    others = [outcome(batch, other) for other in members(batch, row) if other != row]
    return statistics.fmean(others) if others else outcome(batch, row)


CASES: dict[str, tuple[str, dict[str, Any], Callable[[Batch], Rows]]] = {
    "gae": ("gae", {}, reference_gae),
    "grpo": ("grpo", {}, lambda b: whole_row(b, lambda r: outcome_centred(b, r) / outcome_spread(b, r))),
    "grpo_no_std": ("grpo", {"normalize_std": False}, lambda b: whole_row(b, lambda r: outcome_centred(b, r))),
    "grpo_batch_std": (
        "grpo",
        {"extra": {"batch_std": 1.0}},
        lambda b: whole_row(b, lambda r: outcome_centred(b, r) / batch_deviation(b)),
    ),
    "dr_grpo": ("dr_grpo", {}, lambda b: whole_row(b, lambda r: outcome_centred(b, r))),
    "rloo": ("rloo", {}, lambda b: whole_row(b, lambda r: outcome(b, r) - others_mean(b, r))),
    "reinforce_plus_plus": (
        "reinforce_plus_plus",
        {},
        lambda b: whitened({r: returns(b, r, OPTIONS.gamma) for r in participants(b)}),
    ),
    "reinforce_plus_plus_raw": (
        "reinforce_plus_plus",
        {"whiten": False},
        lambda b: {r: returns(b, r, OPTIONS.gamma) for r in participants(b)},
    ),
    "reinforce_plus_plus_baseline": (
        "reinforce_plus_plus_baseline",
        {},
        lambda b: whitened(whole_row(b, lambda r: outcome_centred(b, r))),
    ),
    "remax": (
        "remax",
        {},
        lambda b: {r: [g - float(b.baseline_scores_B[r]) for g in returns(b, r, 1.0)] for r in participants(b)},
    ),
    "opo": ("opo", {}, lambda b: whole_row(b, lambda r: reference_opo(b, r))),
    "gpg": ("gpg", {}, reference_gpg),
    "gdpo": (
        "gdpo",
        {"extra": {"weight_accuracy": 2.0}},
        lambda b: reference_gdpo(b, {"accuracy": 2.0, "format": 1.0}, by_token=False),
    ),
    "gdpo_tokens": (
        "gdpo",
        {"extra": {"whiten_tokens": 1.0}},
        lambda b: reference_gdpo(b, {"accuracy": 1.0, "format": 1.0}, by_token=True),
    ),
    "grpo_passk": ("grpo_passk", {}, lambda b: whole_row(b, lambda r: reference_passk(b, r, 99))),
    "grpo_pass2": (
        "grpo_passk",
        {"extra": {"pass_k": 2.0}},
        lambda b: whole_row(b, lambda r: reference_passk(b, r, 2)),
    ),
    "grpo_pass3": (
        "grpo_passk",
        {"extra": {"pass_k": 3.0}},
        lambda b: whole_row(b, lambda r: reference_passk(b, r, 3)),
    ),
    "optimal_token_baseline": (
        "optimal_token_baseline",
        {},
        lambda b: reference_optimal_baseline(b, zero_tail=True),
    ),
    "optimal_token_baseline_own_tail": (
        "optimal_token_baseline",
        {"extra": {"zero_tail": 0.0}},
        lambda b: reference_optimal_baseline(b, zero_tail=False),
    ),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", CASES)
def test_estimator_equals_its_formula(case: str, seed: int) -> None:
    name, changes, reference = CASES[case]
    batch = random_batch(seed)
    result = ADVANTAGES[name](batch.inputs(KL), replace(OPTIONS, **changes))
    expected = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
    for row, values in reference(batch).items():
        expected[row, sampled(batch, row)] = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(result.advantages_BT, expected, rtol=1e-9, atol=1e-9)
    assert result.metrics["rows"] == len(participants(batch))


def test_every_registered_estimator_has_a_reference() -> None:
    assert {name for name, _, _ in CASES.values()} == set(ADVANTAGES)


def test_gae_returns_are_advantages_plus_values_before_whitening() -> None:
    batch = random_batch(1)
    raw = ADVANTAGES["gae"](batch.inputs(), replace(OPTIONS, whiten=False))
    white = ADVANTAGES["gae"](batch.inputs(), OPTIONS)
    assert raw.returns_BT is not None
    assert white.returns_BT is not None
    active = batch.active_BT
    torch.testing.assert_close(raw.returns_BT[active], (raw.advantages_BT + batch.values_BT)[active])
    torch.testing.assert_close(white.returns_BT, raw.returns_BT)
    assert (raw.returns_BT[~active] == 0).all()


def outcome_inputs(scores: list[float], groups: list[int], lengths: list[int] | None = None) -> AdvantageInputs:
    lengths = lengths or [1] * len(scores)
    mask = torch.tensor([[t < length for t in range(max(lengths))] for length in lengths])
    scores_B = torch.tensor(scores, dtype=torch.float64)
    return AdvantageInputs(
        scores_B, mask, torch.ones(len(scores)).bool(), torch.tensor(groups), token_rewards(scores_B, None, 0.0, mask)
    )


def row_values(name: str, inputs: AdvantageInputs, **changes: Any) -> list[float]:
    options = replace(AdvantageOptions(eps=0.0), **changes)
    return ADVANTAGES[name](inputs, options).advantages_BT[:, 0].tolist()


def test_hand_computed_groups() -> None:
    inputs = outcome_inputs([1.0, 0.0, 0.0, 3.0], [0, 0, 0, 0])
    assert row_values("dr_grpo", inputs) == [0.0, -1.0, -1.0, 2.0]
    assert row_values("grpo", inputs) == pytest.approx([0.0, -(0.5**0.5), -(0.5**0.5), 2**0.5])
    assert row_values("rloo", inputs) == pytest.approx([0.0, -4 / 3, -4 / 3, 8 / 3])
    assert row_values("grpo_passk", inputs, normalize_std=False) == [0.0, 0.0, 0.0, 2.0]
    # Pairs: 3 beats 1, 0, 0 by 2, 3, 3; 1 beats 0, 0 by 1 and loses to 3; each row is in three pairs.
    pairs = row_values("grpo_passk", inputs, normalize_std=False, extra={"pass_k": 2.0})
    assert pairs == pytest.approx([2 / 3, 0.0, 0.0, 8 / 3])


def test_hand_computed_opo_weighs_by_length() -> None:
    inputs = outcome_inputs([1.0, 0.0], [0, 0], lengths=[1, 3])
    assert row_values("opo", inputs) == [0.75, -0.25]


def test_hand_computed_gpg_scales_for_groups_without_signal() -> None:
    inputs = outcome_inputs([1.0, 0.0, 1.0, 1.0], [0, 0, 5, 5])
    assert row_values("gpg", inputs) == [1.0, -1.0, 0.0, 0.0]


def test_hand_computed_gae() -> None:
    mask = torch.tensor([[True, True, False, True]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.25, 99.0, 0.5]], dtype=torch.float64)
    inputs = AdvantageInputs(
        torch.ones(1).double(), mask, torch.ones(1).bool(), torch.zeros(1).long(), rewards, values_BT=values
    )
    # deltas from the end: 1 - .5; .5 * .5 - .25; .5 * .25 - .5, discounted by gamma * lam = .25
    result = ADVANTAGES["gae"](inputs, AdvantageOptions(gamma=0.5, lam=0.5, whiten=False))
    assert result.advantages_BT.tolist() == [[-0.375 + 0.25 * 0.125, 0.125, 0.0, 0.5]]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_empty_width_and_nobody_taking_part(name: str) -> None:
    batch = random_batch(3)
    nobody = replace(batch, valid_B=torch.zeros_like(batch.valid_B))
    result = ADVANTAGES[name](nobody.inputs(), AdvantageOptions())
    assert (result.advantages_BT == 0).all()
    no_tokens = replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))
    assert (ADVANTAGES[name](no_tokens.inputs(), AdvantageOptions()).advantages_BT == 0).all()


@pytest.mark.parametrize("name", sorted(GROUPED_ADVANTAGES))
def test_groups_of_one_are_refused(name: str) -> None:
    batch = random_batch(0, prompts=4, n=1, failures=0.0)
    with pytest.raises(ValueError, match="at least two rows per prompt"):
        ADVANTAGES[name](batch.inputs(), AdvantageOptions())


@pytest.mark.parametrize("name", sorted(GROUPED_ADVANTAGES - {"gdpo", "reinforce_plus_plus_baseline"}))
def test_a_row_left_alone_gets_nothing(name: str) -> None:
    batch = random_batch(0, prompts=2, n=2, failures=0.0)
    batch = replace(batch, groups_B=torch.tensor([1, 1, 2, 2]), valid_B=torch.tensor([True, False, True, True]))
    assert (ADVANTAGES[name](batch.inputs(), AdvantageOptions()).advantages_BT[0] == 0).all()


def test_missing_inputs_say_what_to_do() -> None:
    inputs = replace(
        random_batch(0).inputs(),
        values_BT=None,
        baseline_scores_B=None,
        score_parts={},
        sum_pi_squared_BT=None,
    )
    for name, words in {
        "gae": "needs values",
        "remax": "greedy answer",
        "gdpo": "named scores",
        "optimal_token_baseline": "sum_pi_squared",
    }.items():
        with pytest.raises(ValueError, match=words):
            ADVANTAGES[name](inputs, AdvantageOptions())


def test_wrong_shapes_dtypes_and_scores_are_refused() -> None:
    inputs = random_batch(0, failures=0.0).inputs()
    with pytest.raises(ValueError, match=r"values_BT has shape \(12, 3\), not \(12, 7\)"):
        replace(inputs, values_BT=torch.zeros(12, 3))
    with pytest.raises(ValueError, match=r"score_parts\['style'\] has shape \(5,\), not \(12,\)"):
        replace(inputs, score_parts={"style": torch.zeros(5)})
    with pytest.raises(ValueError, match=r"mask_BT is torch.int64, not torch.bool"):
        replace(inputs, mask_BT=inputs.mask_BT.long())
    broken = inputs.scores_B.clone()
    broken[inputs.taking_part_B.nonzero()[0]] = float("nan")
    with pytest.raises(ValueError, match="a failed grade is valid=False"):
        replace(inputs, scores_B=broken)
    with pytest.raises(ValueError, match="pass_k"):
        ADVANTAGES["grpo_passk"](inputs, AdvantageOptions(extra={"pass_k": 1.0}))
    with pytest.raises(ValueError, match="unknown score 'speed'"):
        ADVANTAGES["gdpo"](inputs, AdvantageOptions(extra={"weight_speed": 1.0}))


def test_float32_scores_all_equal_give_exactly_zero() -> None:
    batch = random_batch(0, failures=0.0)
    inputs = replace(batch, scores_B=torch.full_like(batch.scores_B, 0.1).float()).inputs()
    result = ADVANTAGES["grpo"](replace(inputs, token_rewards_BT=inputs.token_rewards_BT.float()), AdvantageOptions())
    assert (result.advantages_BT == 0).all()
    assert result.metrics["rows_in_flat_groups"] == 1.0
