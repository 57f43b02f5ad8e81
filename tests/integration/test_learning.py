"""The learning itself: on the demo task every family of estimators reaches a mean reward of 0.9, over real services."""

import subprocess
import sys
from pathlib import Path

import pytest

from sextet.client import Client
from sextet.local import LocalServices
from shared.config_loading import load_config

ROOT = Path(__file__).parents[2]
STEPS = 50
METHODS = {
    "ppo": ["algorithm.kl.placement=reward"],
    "async_ppo": ["flow=async_ppo", "algorithm.staleness=1", "algorithm.kl.placement=reward"],
    "grpo": ["flow=grpo", "algorithm.advantage=grpo", "algorithm.kl.placement=none"],
    "rloo": ["flow=grpo", "algorithm.advantage=rloo", "algorithm.kl.placement=none"],
    "reinforce_plus_plus": ["flow=grpo", "algorithm.advantage=reinforce_plus_plus", "algorithm.kl.placement=none"],
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with LocalServices(tmp_path_factory.mktemp("state")) as local, Client(local.endpoint) as client:
        yield client


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_mean_reward_reaches_nine_tenths(client, tmp_path, method, seed):
    model = tmp_path / "model"
    subprocess.run([sys.executable, ROOT / "examples/demo/make_model.py", model], check=True, timeout=300)
    overrides = [
        *METHODS[method],
        f"seed={seed}",
        f"total_steps={STEPS}",
        f"model.path={model}",
        f"data.path={model}/data/train.parquet",
        "data.validation_path=null",
        f"reward.function={ROOT}/examples/demo/reward.py:compute_score",
        f"directory={tmp_path}/run",
    ]
    run = client.create_run(load_config(ROOT / "examples/demo.yaml", overrides))
    steps = [event.metrics for event in client.watch(run.id) if event.kind == "step"]
    rewards = [step["reward"] for step in steps]
    seconds = sum(step["seconds"] for step in steps) / len(steps)
    curve = " ".join(f"{reward:.2f}" for reward in rewards[::5])
    print(f"{method} seed {seed}: {curve} last {rewards[-1]:.3f}; {seconds:.2f} s a step")
    assert client.get_run(run.id).state == "done"
    assert rewards[0] <= 0.4
    assert sum(rewards[-5:]) / 5 >= 0.9
