"""The training batch against plain loops; what takes no part changes nothing else."""

from pathlib import Path

import numpy as np
import pytest

from services.actor.advantages import training_batch
from shared.batch.block import Block, Ragged, RowKey
from shared.config import RunConfig
from tests.fakes.training import join, make_block, make_config, replaced, score

NOWHERE = Path("nowhere")


def config(*overrides: str) -> RunConfig:
    return make_config(NOWHERE, *overrides)


def samples(lengths: tuple[int, ...] = (3, 5, 1, 4), seed: int = 0) -> Block:
    """Two prompts of two samples each, with all the columns that other roles make."""
    rng = np.random.default_rng(seed)
    rows = [RowKey(f"1:{index // 2}:0", index % 2) for index in range(len(lengths))]
    responses = [rng.integers(4, 64, n) for n in lengths]
    block = make_block(rows, [rng.integers(4, 64, 3) for _ in lengths], responses, [-rng.random(n) for n in lengths])
    for name in ("old_logprobs", "ref_logprobs", "values"):
        block = replaced(block, name, [-rng.random(n) for n in lengths])
    return block


def graded(block: Block, *grades: float | None) -> Block:
    remaining = iter(grades)
    return join(block, score(block, lambda _: next(remaining)))


def rows_of(block: Block, name: str) -> dict[RowKey, np.ndarray]:
    return dict(zip(block.rows, block[name].rows(), strict=True))


def test_gae_with_kl_in_the_reward_against_a_plain_loop() -> None:
    block, grades, gamma, lam, coef = samples(), (1.0, 0.0, 0.5, -1.0), 0.9, 0.8, 0.3
    overrides = ("algorithm.gamma=0.9", "algorithm.lam=0.8", "algorithm.whiten_advantages=false")
    made, metrics = training_batch(
        graded(block, *grades), config(*overrides, "algorithm.kl.placement=reward", "algorithm.kl.estimator=k1"), coef
    )
    penalties = []
    for index, key in enumerate(block.rows):
        old, ref, values = (
            block[name].rows()[index].astype(float) for name in ("old_logprobs", "ref_logprobs", "values")
        )
        rewards = -coef * (old - ref)
        penalties += list(old - ref)
        rewards[-1] += grades[index]
        advantage, next_value, advantages = 0.0, 0.0, np.zeros(len(old))
        for t in reversed(range(len(old))):
            advantage = rewards[t] + gamma * next_value - values[t] + gamma * lam * advantage
            next_value, advantages[t] = values[t], advantage
        np.testing.assert_allclose(rows_of(made, "advantages")[key], advantages, atol=1e-6)
        np.testing.assert_allclose(rows_of(made, "returns")[key], advantages + values, atol=1e-6)
    assert metrics["kl"] == pytest.approx(np.mean(penalties), abs=1e-6)
    assert metrics["kl_coef"] == coef
    assert metrics["score_mean"] == pytest.approx(0.125)
    assert metrics["score_std"] == pytest.approx(np.std(grades))
    assert (metrics["score_min"], metrics["score_max"]) == (-1, 1)
    assert metrics["response_length"] == 3.25
    assert metrics["truncated_fraction"] == 1.0


def test_kl_in_the_loss_leaves_the_reward_alone() -> None:
    block, overrides = graded(samples(), 1.0, 0.0, 0.5, -1.0), ("algorithm.whiten_advantages=false",)
    plain, _ = training_batch(block, config(*overrides), 0.3)
    in_loss, metrics = training_batch(block, config(*overrides, "algorithm.kl.placement=loss"), 0.3)
    assert plain["advantages"] == in_loss["advantages"]
    assert in_loss["ref_logprobs"] == block["ref_logprobs"].take([block.rows.index(key) for key in in_loss.rows])
    assert "kl" in metrics


@pytest.mark.parametrize("advantage", ["gae", "grpo", "reinforce_plus_plus"])
def test_a_failed_grade_or_an_empty_answer_changes_no_other_row(advantage: str) -> None:
    """Row 3's grade failed and row 4 is empty: the others get what they would get without them."""
    chosen = config(f"algorithm.advantage={advantage}", "algorithm.kl.placement=reward")
    whole = samples((3, 5, 2, 0, 4, 2, 3, 3))
    block = graded(whole, 1.0, 0.0, None, 1.0, 0.2, 0.7, 0.1, 0.3)
    made, metrics = training_batch(block, chosen, 0.1)
    kept = [key for key in block.rows if key.uid != "1:1:0"]
    without, _ = training_batch(block.select(kept), chosen, 0.1)
    for name in ("advantages", "old_logprobs", "response_mask"):
        for key in kept:
            np.testing.assert_allclose(rows_of(made, name)[key], rows_of(without, name)[key], rtol=1e-6)
    for key in (RowKey("1:1:0", 0), RowKey("1:1:0", 1)):
        assert not rows_of(made, "response_mask")[key].any()
        assert not rows_of(made, "advantages")[key].any()
        assert rows_of(made, "valid")[key] == 0
    assert (metrics["rows_invalid"], metrics["rows_empty"]) == (1, 1)
    assert metrics["rows"] == 6


def test_nothing_valid_is_no_error_and_carries_no_loss() -> None:
    made, metrics = training_batch(graded(samples(), None, None, None, None), config(), 0.0)
    assert not made["response_mask"].data.any()
    assert metrics["rows_invalid"] == 4


def test_the_order_of_rows_changes_no_bit() -> None:
    block = graded(samples((3, 5, 1, 4, 7, 2)), 1.0, 0.0, 0.5, -1.0, 0.3, 0.1)
    one, first = training_batch(block, config(), 0.1)
    other, second = training_batch(block.select(block.rows[::-1]), config(), 0.1)
    assert one.digest() == other.digest()
    assert first == second


def test_the_score_goes_to_the_last_sampled_token_and_tool_tokens_carry_nothing() -> None:
    block = graded(samples((4, 4)), 1.0, 0.0)
    masks = [np.array([1, 0, 1, 0]), np.array([1, 1, 1, 1])]
    block = replaced(block, "response_mask", masks)
    made, _ = training_batch(block, config("algorithm.whiten_advantages=false", "algorithm.lam=0"), 0.0)
    first, values = RowKey("1:0:0", 0), block["values"].rows()[0]
    np.testing.assert_allclose(
        rows_of(made, "advantages")[first], [values[2] - values[0], 0, 1 - values[2], 0], atol=1e-6
    )
    np.testing.assert_array_equal(rows_of(made, "response_mask")[first], masks[0])


def test_cut_answers_as_scored_at_zero_or_without_loss() -> None:
    block = samples()
    finish = Ragged.from_text(["stop", "length", "stop", "stop"])
    block = graded(Block(block.rows, {**block.columns, "finish": finish}), 1.0, 1.0, 0.0, 0.0)
    grpo = ("algorithm.advantage=grpo", "algorithm.normalize_std=false")
    results = {
        mode: training_batch(block, config(*grpo, f"algorithm.truncated={mode}"), 0.0)[0]
        for mode in ("keep", "zero", "mask")
    }
    cut = RowKey("1:0:0", 1)
    assert rows_of(results["keep"], "advantages")[cut][0] == 0
    assert rows_of(results["zero"], "advantages")[cut][0] == -0.5
    assert not rows_of(results["mask"], "response_mask")[cut].any()
    assert rows_of(results["mask"], "response_mask")[RowKey("1:0:0", 0)].all()


def test_long_answers_pay() -> None:
    block = graded(samples((4, 8, 6, 8)), 1.0, 1.0, 1.0, 1.0)
    overrides = ("algorithm.advantage=grpo", "algorithm.normalize_std=false", "algorithm.overlong_buffer=4")
    made, metrics = training_batch(block, config(*overrides), 0.0)
    assert rows_of(made, "advantages")[RowKey("1:0:0", 0)][0] == 0.5
    assert rows_of(made, "advantages")[RowKey("1:1:0", 1)][0] == -0.25
    assert metrics["score_mean"] == 1.0, "the metric is what the grader said"


def test_a_conversation_in_several_rows_is_one_sample_of_its_group() -> None:
    """Rewards 0 (one row) and 1 (three rows): mean 1/2 and standard deviation sqrt(1/2), as of two rows."""
    keys = [RowKey("1:0:0", 0), RowKey("1:0:0", 1), RowKey("1:0:0", 1).part(1), RowKey("1:0:0", 1).part(2)]
    tokens = [np.array([5, 6])] * 4
    block = replaced(make_block(keys, tokens, tokens, [np.zeros(2)] * 4), "old_logprobs", [np.zeros(2)] * 4)
    made, _ = training_batch(graded(block, 0.0, 1.0, 1.0, 1.0), config("algorithm.advantage=grpo"), 0.0)
    value = 0.5 / (0.5**0.5 + 1e-6)
    for key, advantages in rows_of(made, "advantages").items():
        np.testing.assert_allclose(advantages, [value if key.sample else -value] * 2, rtol=1e-6)


def test_greedy_rows_are_compared_with_and_not_trained_on() -> None:
    """A prompt whose greedy answer was not graded costs its rows only."""
    rows = [RowKey(f"1:{prompt}:0", sample) for prompt in range(2) for sample in range(3)]
    ids = [np.array([5, 6])] * 6
    block = make_block(rows, ids, ids, [np.zeros(2)] * 6)
    block = graded(replaced(block, "old_logprobs", [np.zeros(2)] * 6), 1.0, 0.0, 0.25, 1.0, 0.0, None)
    made, metrics = training_batch(block, config("algorithm.advantage=remax"), 0.0)
    assert made.rows == (rows[0], rows[1], rows[3], rows[4])
    np.testing.assert_allclose(rows_of(made, "advantages")[rows[0]], [0.75, 0.75])
    np.testing.assert_allclose(rows_of(made, "advantages")[rows[1]], [-0.25, -0.25])
    assert not rows_of(made, "response_mask")[rows[3]].any()
    assert metrics["score_mean"] == 0.5


def test_rollout_correction_weights_and_rejects() -> None:
    block = graded(samples((2, 2)), 1.0, 0.0)
    block = replaced(block, "rollout_logprobs", [[-1.0, -1.0], [-1.0, -1.0]])
    block = replaced(block, "old_logprobs", [[-1.0, -0.5], [-1.0, -9.0]])
    on = "algorithm.correction.mode=decoupled"
    capped, metrics = training_batch(block, config(on, "algorithm.correction.token_cap=1.2"), 0.0)
    np.testing.assert_allclose(capped["loss_weights"].data, [1, 1.2, 1, np.exp(-8)], rtol=1e-5)
    assert metrics["rollout_logprob_abs_difference_max"] == 8
    reject = (on, "algorithm.correction.reject=token_k2", "algorithm.correction.reject_threshold=1.0")
    rejected, metrics = training_batch(block, config(*reject), 0.0)
    np.testing.assert_array_equal(rejected["response_mask"].data, [1, 1, 1, 0])
    assert metrics["rollout_rejected_fraction"] == 0.25
    bypass, _ = training_batch(replaced(block, "old_logprobs", None), config("algorithm.correction.mode=bypass"), 0.0)
    np.testing.assert_array_equal(bypass["old_logprobs"].data, [-1, -1, -1, -1])


@pytest.mark.parametrize(
    ("missing", "overrides", "message"),
    [
        ("values", (), "needs values"),
        ("ref_logprobs", ("algorithm.kl.placement=reward",), "'ref_logprobs' is missing"),
        ("ref_logprobs", ("algorithm.kl.placement=loss",), "'ref_logprobs' is missing"),
        ("old_logprobs", (), "needs the actor's log-probs"),
    ],
)
def test_a_missing_column_is_named(missing: str, overrides: tuple[str, ...], message: str) -> None:
    block = replaced(graded(samples(), 1.0, 0.0, 0.5, -1.0), missing, None)
    with pytest.raises(ValueError, match=message):
        training_batch(block, config(*overrides), 0.1)


def test_a_column_that_does_not_fit_is_named() -> None:
    block = replaced(graded(samples((2, 3)), 1.0, 0.0), "values", [[0.0, 0.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match="'values' has 2 elements in row 1:0:0#1, whose response has 3"):
        training_batch(block, config(), 0.0)
