"""Names, options, and what is refused before a run starts."""

import pytest
import torch
from algo_batches import random_batch

from shared.algo import (
    ADVANTAGES,
    GROUPED_ADVANTAGES,
    POLICY_LOSSES,
    AdvantageInputs,
    AdvantageOptions,
    Advantages,
    PolicyLossInputs,
    PolicyLossOptions,
    advantage_estimator,
    check_algorithm,
    policy_loss,
    register_advantage,
    register_policy_loss,
)


def test_the_promised_names_are_there() -> None:
    assert set(ADVANTAGES) == {
        "gae", "grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
        "remax", "opo", "gpg", "gdpo", "optimal_token_baseline",
    }  # fmt: skip
    assert set(POLICY_LOSSES) == {
        "ppo", "gspo", "sapo", "cispo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "geo_mean", "gpg", "dro",
        "cross_entropy", "importance_sampling", "reinforce",
    }  # fmt: skip


def test_unknown_names_say_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown advantage estimator 'grpoo'; did you mean 'grpo'"):
        advantage_estimator("grpoo")
    with pytest.raises(ValueError, match="unknown policy loss 'gsp'; did you mean 'gspo'"):
        policy_loss("gsp")


def test_options_are_checked_by_name_where_they_are_used() -> None:
    inputs = random_batch(0).inputs()
    with pytest.raises(ValueError, match=r"'grpo_passk' does not read option 'passk' .*did you mean 'pass_k'"):
        ADVANTAGES["grpo_passk"](inputs, AdvantageOptions(extra={"passk": 2.0}))
    with pytest.raises(ValueError, match=r"'ppo' does not read option 'tau_pos' .*it reads none"):
        check_algorithm("gae", "ppo", 1, loss_extra={"tau_pos": 1.0})
    check_algorithm("gdpo", "sapo", 2, advantage_extra={"weight_style": 0.5}, loss_extra={"tau_pos": 1.0})


@pytest.mark.parametrize("name", sorted(GROUPED_ADVANTAGES))
def test_group_statistics_with_one_sample_are_refused_before_the_run(name: str) -> None:
    check_algorithm(name, "ppo", 2)
    with pytest.raises(ValueError, match=f"'{name}' compares the answers to one prompt but rollout.n is 1"):
        check_algorithm(name, "ppo", 1)


def test_estimators_for_one_sample_are_allowed() -> None:
    for name in set(ADVANTAGES) - GROUPED_ADVANTAGES:
        check_algorithm(name, "ppo", 1)


def test_gdpo_with_something_in_the_reward_that_it_does_not_see_is_refused() -> None:
    with pytest.raises(ValueError, match="set kl"):
        check_algorithm("gdpo", "ppo", 4, kl_in_reward=True)
    with pytest.raises(ValueError, match="set overlong_buffer=0"):
        check_algorithm("gdpo", "ppo", 4, score_shaping=True)


@pytest.fixture
def own_names():
    yield "test_own_advantage", "test_own_loss"
    ADVANTAGES.pop("test_own_advantage", None)
    POLICY_LOSSES.pop("test_own_loss", None)
    GROUPED_ADVANTAGES.discard("test_own_advantage")


def test_a_user_adds_an_estimator_and_a_loss_in_a_few_lines(own_names: tuple[str, str]) -> None:
    advantage, loss = own_names

    @register_advantage(advantage, grouped=True, scale=3.0)
    def constant(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
        return Advantages(inputs.active_BT * options.extra["scale"], None, {})

    @register_policy_loss(loss, power=2.0)
    def powered(inputs: PolicyLossInputs, options: PolicyLossOptions) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return inputs.advantages_BT ** options.extra["power"] * inputs.mask_BT, {}

    batch = random_batch(0)
    result = advantage_estimator(advantage)(batch.inputs(), AdvantageOptions(extra={"scale": 4.0}))
    assert set(result.advantages_BT.unique().tolist()) == {0.0, 4.0}
    inputs = PolicyLossInputs(batch.old_logprobs_BT, batch.old_logprobs_BT, result.advantages_BT, batch.active_BT)
    assert set(policy_loss(loss)(inputs, PolicyLossOptions())[0].unique().tolist()) == {0.0, 16.0}
    with pytest.raises(ValueError, match="is 1: set"):
        check_algorithm(advantage, loss, 1)
    with pytest.raises(ValueError, match=f"'{advantage}' is already registered"):
        register_advantage(advantage)(constant)
