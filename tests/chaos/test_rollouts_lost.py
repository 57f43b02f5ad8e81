"""Of three rollouts one is killed and one is frozen in the same step: the step completes on the third, with the bits of
a run with one rollout that nothing happens to."""

import signal
import time
from pathlib import Path

import pytest

from services.controller.prompts import DatasetOrder
from tests.chaos.histories import violations
from tests.chaos.processes import ROWS, Cluster, run_config

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 6


async def test_one_is_killed_and_one_is_frozen(tmp_path: Path) -> None:
    config = run_config(tmp_path / "inputs", total_steps=STEPS, data__batch_size=4)
    lease = {"SEXTET_LEASE_TTL": "6"}
    async with Cluster(tmp_path / "three", {"rollout": 3}, lease) as cluster:
        alone = config | {"rollout": {**config["rollout"], "replicas": 1}}
        await cluster.create("undisturbed", alone)
        assert (await cluster.end("undisturbed")).state == "done"
        await cluster.create("r", config | {"rollout": {**config["rollout"], "replicas": 3}})
        await cluster.until("the first step", lambda: cluster.step("r") >= 1)
        calm = time.monotonic()
        await cluster.until("the second", lambda: cluster.step("r") >= 2)
        calm = time.monotonic() - calm
        cluster.signal("rollout-0", signal.SIGKILL)
        cluster.signal("rollout-1", signal.SIGSTOP)
        began, step = time.monotonic(), cluster.step("r")
        # The step that was in progress may have had its samples already: the one after it has not.
        await cluster.until("the step after", lambda: cluster.step("r") >= step + 2, 60)
        took, steps = time.monotonic() - began, 5 + 4 * calm
        assert took < 10 + steps, f"10 s to find the frozen one, {steps:.1f} s for two steps on this machine"
        cluster.signal("rollout-1", signal.SIGCONT)
        run = await cluster.end("r")
        assert (run.state, run.reason, run.step) == ("done", "", STEPS)
        assert violations(cluster.journal("r"), cluster.applied("r"), DatasetOrder(ROWS, 0, True)) == []
        assert cluster.sha256("r") == cluster.sha256("undisturbed")
