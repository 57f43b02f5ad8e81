"""What ranks tell each other about their time."""

import asyncio
from typing import Any

from shared.training.group import ALONE, Group
from shared.training.role import by_rank
from tests.fakes.ranks import run_ranks

LATE = 2.0


def rank_1_is_late(group: Group, job: dict[str, Any]) -> dict[str, float]:
    async def work() -> str:
        group.exchange("ready")
        if group.rank == 1:
            await asyncio.sleep(LATE)
        group.exchange("done")
        return "result"

    group.exchange("begin")
    result, seconds = asyncio.run(by_rank(group, work()))
    assert result == "result"
    return {**seconds, "waited": group.waited}


def test_who_waits_for_the_slowest_is_not_slow() -> None:
    ranks = run_ranks("tests.unit.shared.training.test_training_ranks:rank_1_is_late", 2, {})
    for told in ranks:
        assert told["rank_seconds_min"] < LATE <= told["rank_seconds_max"]
    assert ranks[0]["waited"] > ranks[1]["waited"]


async def test_alone_there_is_nobody_to_compare_with() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert await by_rank(ALONE, work()) == (7, {})
