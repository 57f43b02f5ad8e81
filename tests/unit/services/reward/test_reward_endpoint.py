"""SEXTET_REWARD_ENDPOINT puts an external grader in the place of what runs name."""

import pytest

from services.reward.role import RewardRole
from shared.config_loading import load_config

CONFIG = load_config(
    {"model": {"path": "m"}, "data": {"path": "d"}, "reward": {"function": "a:b"}, "total_steps": 1}
)  # fmt: skip


class FakeBackend:
    async def open(self, config):
        return {}

    async def score(self, run, items):
        return []

    async def close(self):
        pass


@pytest.mark.parametrize(
    ("endpoint", "backend"), [("", "function"), ("grader:50060", "grpc"), ("http://grader:8000/score", "http")]
)
async def test_the_endpoint_of_the_service_takes_the_place_of_the_run_s_grader(endpoint, backend):
    opened = []

    def open_backend(config):
        opened.append(config.reward)
        return FakeBackend()

    await RewardRole(open_backend, endpoint).configure(CONFIG, "run", None)
    assert (opened[0].backend, opened[0].endpoint) == (backend, endpoint or None)
