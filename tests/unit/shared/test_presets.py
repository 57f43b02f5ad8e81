"""Presets fill in what the user has not set, and only that; every preset is one that the algorithms accept."""

import pytest

from shared.algo import check_algorithm
from shared.config import ConfigError, dump_config
from shared.config_loading import load_config
from shared.presets import PRESETS, describe_preset

BASE = {"model": {"path": "m"}, "data": {"path": "d"}, "reward": {"function": "a:b"}, "total_steps": 1}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_run_that_the_algorithms_accept(name):
    config = load_config({**BASE, "rollout": {"n": 4}, "algorithm": name})
    assert config.algorithm.preset == name
    check_algorithm(config.algorithm.advantage, config.algorithm.policy_loss, config.rollout.n)
    assert load_config(dump_config(config)) == config, "a dumped configuration means the same"


def test_what_the_user_sets_stays():
    config = load_config({**BASE, "algorithm": {"preset": "dapo"}}, ["actor.loss.clip_ratio_high=0.3"])
    assert (config.flow, config.actor.loss.clip_ratio_high) == ("dapo", 0.3)
    assert load_config({**BASE, "flow": "x.py:Mine", "algorithm": "dapo"}).flow == "x.py:Mine"


def test_a_preset_can_be_named_by_override():
    assert load_config(BASE, ["algorithm=rloo"]).algorithm.advantage == "rloo"


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="'dapoo'; did you mean 'dapo'"):
        load_config({**BASE, "algorithm": "dapoo"})


def test_a_preset_chosen_by_override_wins_over_the_file_and_not_over_other_overrides():
    file = {**BASE, "flow": "ppo", "algorithm": {"advantage": "gae", "gamma": 0.9, "kl": {"coef": 0.5}}}
    config = load_config(file, ["algorithm.kl.coef=0.2", "algorithm.advantage=opo", "algorithm=rloo"])
    assert (config.flow, config.algorithm.advantage, config.algorithm.gamma) == ("grpo", "opo", 0.9)
    assert (config.algorithm.kl.placement, config.algorithm.kl.coef) == ("reward", 0.2)


def test_the_readme_s_preset_fits_the_demo():
    config = load_config("examples/demo.yaml", ["actor.optimizer.lr=1e-4", "algorithm=rloo"])
    assert (config.flow, config.algorithm.advantage) == ("grpo", "rloo")


def test_the_description_tells_the_values_that_hold():
    config = load_config({**BASE, "algorithm": "dapo"}, ["actor.loss.clip_ratio_low=0.1"])
    text = describe_preset("dapo", config.model_dump())
    assert "actor.loss.clip_ratio_high=0.28" in text
    assert "actor.loss.clip_ratio_low=0.1" in text
