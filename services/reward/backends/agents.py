"""Rewards that agents gave to their conversations (`rollout.agents`); they stand in extra_info, for every grader."""

from collections.abc import Sequence

from services.reward.backend import Grade, Item, failed, valid_grade
from shared.config import RunConfig


class AgentsBackend:
    """See services/reward/backend.py."""

    async def open(self, config: RunConfig) -> dict[str, str]:
        return {}

    async def score(self, run: str, items: Sequence[Item]) -> list[Grade]:
        return [_grade(item) for item in items]

    async def close(self) -> None:
        return None


def _grade(item: Item) -> Grade:
    said = item.extra_info.get("agent") if isinstance(item.extra_info, dict) else None
    if not isinstance(said, dict) or said.get("reward") is None:
        return failed("ungraded", "its agent gave no reward")
    return valid_grade(said["reward"])
