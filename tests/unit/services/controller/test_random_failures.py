"""Random faults in random places: whatever happens, a run that ends has the weights of an undisturbed one.

A failure prints its seed; SEXTET_CHAOS_SEEDS=N tries N of them (default 8).
"""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest

from shared.rpc.errors import Aborted, Internal, ResourceExhausted, Unavailable
from tests.fakes.sextet import FakeRole, FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller
from tests.unit.services.controller.test_failures import outcome, undisturbed

__all__ = ["undisturbed"]

SEEDS = int(os.environ.get("SEXTET_CHAOS_SEEDS", "8"))
OPERATIONS = {
    "rollout": ["generate", "after generate", "prepare_weights", "commit_weights", "configure"],
    "reward": ["score", "after score"],
    "reference": ["logprobs", "after logprobs"],
    "critic": ["values", "update", "applied", "after update", "checkpoint"],
    "actor": ["logprobs", "advantages", "update", "applied", "after update", "publish_weights", "checkpoint", "export"],
}
recoveries: list[int] = []
ERRORS = (Unavailable, ResourceExhausted, Aborted, Internal)


def arm(fake: FakeRole, operation: str, after: int, kind: str, error: type[Exception], tasks: list[Any]) -> None:
    """The fault strikes once, when the operation has been done `after` times."""
    left = [after]

    async def strike(request: Any) -> None:
        left[0] -= 1
        if left[0] != -1:
            return
        if kind == "error":
            # What has been applied can't be an error that leaves no trace.
            if operation not in ("applied", "after update"):
                raise error("a fault of the test")
        elif kind == "slow":
            await asyncio.sleep(0.3)
        else:
            tasks.append(asyncio.create_task(restart(fake)))
            await asyncio.sleep(60)

    fake.hooks[operation] = strike


async def restart(fake: FakeRole) -> None:
    await fake.kill()
    await asyncio.sleep(0.1)
    await fake.start()


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_random_faults_change_nothing(
    fakes: FakeSextet, store: Any, tmp_path: Path, undisturbed: Any, seed: int
) -> None:
    choose = random.Random(seed)
    await fakes.start(*ALL, "rollout-1", "reward-1")
    tasks: list[Any] = []
    for _ in range(4):
        name = choose.choice(sorted(fakes.replicas))
        operation = choose.choice(OPERATIONS[fakes[name].role])
        kind = choose.choice(["kill", "kill", "error", "slow"])
        arm(fakes[name], operation, choose.randrange(3), kind, choose.choice(ERRORS), tasks)
    changes = {"recovery__max_retries": 6}
    if choose.random() < 0.5:
        # The controller ends somewhere, too.
        async with Controller(store, tmp_path / "runs") as first:
            await first.create("r", **changes)
            await asyncio.sleep(choose.uniform(0, 1))
    async with Controller(store, tmp_path / "runs") as controller:
        assert await outcome(controller, fakes, **changes) == undisturbed
        recoveries.append(sum(kind == "recovery" for kind, _, _ in await controller.events("r")))
    await asyncio.gather(*tasks)


def test_the_faults_were_real() -> None:
    if not recoveries:
        pytest.skip("nothing was played")
    assert sum(count > 0 for count in recoveries) > len(recoveries) / 2
