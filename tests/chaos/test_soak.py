"""A long run with a kill about every 20 steps: SEXTET_SOAK_STEPS of them (default 240, ten minutes; the nightly 1,000).

What it measures is printed and left in `soak.json`.
"""

import asyncio
import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from services.controller.prompts import DatasetOrder
from tests.chaos.histories import violations
from tests.chaos.processes import ROWS, Cluster, run_config
from tests.chaos.test_kill_matrix import POINTS, PROVOKED

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(6 * 3600)]
STEPS, EVERY = int(os.environ.get("SEXTET_SOAK_STEPS", "240")), 20
# A step of the tiny model takes a tenth of a second, and a recovery one or two: for the share of time that kills cost
# to mean anything, steps are as long as those of a small real run. Grading takes that time.
STEP_SECONDS = 2.0
EFFECTIVE, GROWTH = 0.9, 0.05


@dataclass
class Watch:
    """Memory and descriptors of processes that were not killed, by process id."""

    samples: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def look(self, cluster: Cluster) -> None:
        for process in cluster.processes.values():
            try:
                one = psutil.Process(process.pid)
                seen = (one.memory_info().rss, one.num_fds())
            except psutil.Error:
                continue
            self.samples.setdefault(process.pid, []).append(seen)

    def growth(self) -> tuple[float, int]:
        """Of the process that was watched the longest: memory after its first third, and descriptors, to its end."""
        longest = max(self.samples.values(), key=len)
        settled = longest[len(longest) // 3]
        return longest[-1][0] / settled[0] - 1, longest[-1][1] - settled[1]


async def test_soak(tmp_path: Path) -> None:
    seed = int(os.environ.get("SEXTET_CHAOS_SEED", "0"))
    choose, watch, deaths = random.Random(seed), Watch(), 0
    places = [point for points in POINTS.values() for point in points if point not in PROVOKED]
    config = run_config(tmp_path / "inputs", total_steps=STEPS)
    rows = config["data"]["batch_size"] * config["rollout"]["n"]
    reward, wait = tmp_path / "inputs" / "reward.py", f"    import time; time.sleep({STEP_SECONDS / rows})\n    return"
    reward.write_text(reward.read_text().replace("    return", wait))
    async with Cluster(tmp_path / "cluster") as cluster:
        await cluster.create("calm", config | {"total_steps": 12})
        await cluster.until("the calm run begins", lambda: cluster.step("calm") >= 2)
        began = time.monotonic()
        assert (await cluster.end("calm")).state == "done"
        step_seconds = (time.monotonic() - began) / 10
        await cluster.create("r", config)
        await cluster.until("the first step", lambda: cluster.step("r") >= 1)
        began, first, next_kill = time.monotonic(), cluster.step("r"), EVERY
        while (step := cluster.step("r")) < STEPS:
            if step >= next_kill:
                cluster.arm(choose.choice(places))
                deaths, next_kill = deaths + 1, next_kill + EVERY
            watch.look(cluster)
            await asyncio.sleep(0.5)
        took = time.monotonic() - began
        run = await cluster.end("r", 600)
        assert (run.state, run.reason, run.step) == ("done", "", STEPS)
        assert violations(cluster.journal("r"), cluster.applied("r"), DatasetOrder(ROWS, 0, True)) == []
        memory, descriptors = watch.growth()
        effective = (STEPS - first) * step_seconds / took
        found = {
            "steps": STEPS, "kills": len(cluster.ended), "armed": deaths, "seconds": round(took, 1),
            "step_seconds": round(step_seconds, 3), "effective": round(effective, 3),
            "memory_growth": round(memory, 4), "descriptors": descriptors,
        }  # fmt: skip
        (tmp_path / "soak.json").write_text(json.dumps(found))
        print(json.dumps(found))
        assert memory < GROWTH
        assert descriptors <= 8
        assert effective >= EFFECTIVE
