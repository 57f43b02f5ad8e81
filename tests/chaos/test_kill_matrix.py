"""`kill -9` of each role at each named place of a step, one after the other within a run: the run ends as if nothing
had happened, no step lost or doubled, the same bits after every step and at the end.

`make nightly` draws 100 of them (SEXTET_CHAOS_KILLS; the seed is printed and set by SEXTET_CHAOS_SEED).
"""

import base64
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.controller.prompts import DatasetOrder
from shared.gen.sextet.v1 import weights_pb2
from tests.chaos.histories import violations
from tests.chaos.processes import KILLED, ROLES, ROWS, Cluster, run_config

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

CALL = ("arrived", "received", "begin", "applied", "done", "replied")
CHANGE = (*CALL[:4], "before_history", "after_history", *CALL[4:])


def of(operation: str, places: tuple[str, ...]) -> list[str]:
    return [f"{operation}.{place}" for place in places]


SAVE = ("checkpoint.staged", "checkpoint.write", "checkpoint.manifest", "directory.rename", "directory.done")
POINTS = {
    "controller": of(
        "controller",
        (
            "before_issue", "after_issue", "before_rollout.generate", "after_rollout.generate", "before_actor.update",
            "after_actor.update", "after_critic.update", "before_sync", "before_commit_weights", "after_sync",
            "before_commit", "after_commit", "before_checkpoint", "after_checkpoint", "before_begin", "after_begin",
            "before_rollback", "after_rollback", "after_actor.stage",
        ),
    ),
    "actor": [
        *of("actor.update", CHANGE), "training.step@actor", "training.applied@actor", "actor.stage.done",
        "actor.checkpoint.begin",
        *(f"{place}@actor" for place in SAVE), "actor.checkpoint.done", "actor.publish_weights.applied",
        "weights.sent@actor", "data.sent@actor",
    ],
    "critic": [
        *of("critic.update", CHANGE), "training.step@critic", "training.applied@critic", "critic.stage.done",
        "critic.checkpoint.begin",
        *(f"{place}@critic" for place in SAVE), "critic.checkpoint.done", "data.sent@critic",
    ],
    "rollout": [
        *of("rollout.generate", CALL), "rollout.sample", "spool.before_write", "spool.after_write",
        "data.sent@rollout", "rollout.prepare_weights.begin",
        "rollout.prepare_weights.applied", "rollout.commit", "rollout.commit_weights.applied",
        "rollout.commit_weights.done", "rollout.commit_weights.replied",
    ],
    "reward": [*of("reward.score", CALL), "data.sent@reward"],
    "reference": [*of("reference.logprobs", CALL), "data.sent@reference"],
}  # fmt: skip
PROVOKED = {
    "controller.before_begin": "controller-0", "controller.after_begin": "controller-0",
    "controller.before_rollback": "actor-0", "controller.after_rollback": "actor-0",
}  # fmt: skip
"""Places of a recovery: that replica is killed, too, so that there is one."""
STEPS = 2 * max(map(len, POINTS.values())) + 2
# A kill whose place is not reached again before the controller took hold of the run anew.
STRIKE_SECONDS, RECOVER_SECONDS = 90, 120
KILLS, SEED = int(os.environ.get("SEXTET_CHAOS_KILLS", "6")), os.environ.get("SEXTET_CHAOS_SEED")
seconds: dict[str, float] = {}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path_factory.mktemp("matrix")) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def undisturbed(cluster: Cluster) -> list[str]:
    """Digests of the weights after every step of an uninterrupted run, and of the model at its end."""
    await cluster.create("undisturbed", config(cluster))
    run = await cluster.end("undisturbed", 300)
    assert (run.state, run.reason, run.step) == ("done", "", STEPS)
    assert history_of(cluster, "undisturbed") == []
    assert not cluster.ended
    return bits(cluster, "undisturbed")


def config(cluster: Cluster) -> dict[str, Any]:
    return run_config(cluster.directory / "inputs", total_steps=STEPS)


def bits(cluster: Cluster, id: str) -> list[str]:
    digests = {
        line["step"]: weights_pb2.WeightsRef.FromString(base64.b64decode(line["weights"])).digest
        for line in cluster.journal(id)
        if line["kind"] == "commit"
    }
    return [*(digests[step] for step in sorted(digests)), cluster.sha256(id)]


def history_of(cluster: Cluster, id: str) -> list[str]:
    return violations(cluster.journal(id), cluster.applied(id), DatasetOrder(ROWS, 0, True))


async def strike(cluster: Cluster, id: str, replica: str, point: str) -> None:
    """Kills the replica at the point, and waits until the run has committed a step since."""
    before, started, killed = len(cluster.ended), time.monotonic(), [replica]
    if provoked := PROVOKED.get(point):
        killed.append(provoked)
    others = {name: each.pid for name, each in cluster.processes.items() if name not in killed}
    cluster.arm(point)
    if provoked:
        cluster.signal(provoked, signal.SIGKILL)
    await cluster.until(f"{replica} to be killed at {point}", lambda: cluster.struck(point), STRIKE_SECONDS)
    step = cluster.step(id)
    await cluster.until(f"a step after {point}", lambda: cluster.step(id) > step, RECOVER_SECONDS)
    seconds[point] = time.monotonic() - started
    # Killed after its reply, the step may be committed before anybody has seen its end.
    await cluster.until(
        f"{', '.join(killed)} to be started again",
        lambda: (
            len(cluster.ended) >= before + len(killed)
            and all(cluster.processes[name].returncode is None for name in killed)
        ),
    )
    ended = cluster.ended[before:]
    assert (sorted(each.replica for each in ended), {each.code for each in ended}) == (sorted(killed), {KILLED})
    # Only who failed was started again.
    assert {name: each.pid for name, each in cluster.processes.items() if name not in killed} == others
    print(f"{point}: {seconds[point]:.1f} s, at step {step}", flush=True)


@pytest.mark.parametrize("role", ROLES)
async def test_killed_at_every_place_it_changes_no_bit(cluster: Cluster, undisturbed: list[str], role: str) -> None:
    await play(cluster, undisturbed, f"kill-{role}", [(f"{role}-0", point) for point in POINTS[role]])


@pytest.mark.nightly
async def test_killed_at_random(cluster: Cluster, undisturbed: list[str]) -> None:
    seed = int(SEED) if SEED else random.SystemRandom().randrange(10**6)
    print(f"SEXTET_CHAOS_SEED={seed}")
    choose = random.Random(seed)
    pairs = [(f"{role}-0", point) for role, points in POINTS.items() for point in points]
    chosen = [choose.choice(pairs) for _ in range(KILLS)]
    per_run = STEPS // 2 - 1
    for number, first in enumerate(range(0, len(chosen), per_run)):
        await play(cluster, undisturbed, f"random-{seed}-{number}", chosen[first : first + per_run])


async def play(cluster: Cluster, undisturbed: list[str], id: str, kills: list[tuple[str, str]]) -> None:
    await cluster.create(id, config(cluster))
    await cluster.until("the first step", lambda: cluster.step(id) >= 1)
    for replica, point in kills:
        await strike(cluster, id, replica, point)
    run = await cluster.end(id, 300)
    assert (run.state, run.reason, run.step) == ("done", "", STEPS)
    assert history_of(cluster, id) == []
    assert bits(cluster, id) == undisturbed


def test_every_role_has_its_places() -> None:
    assert set(POINTS) == set(ROLES)
    assert sum(map(len, POINTS.values())) >= 70
    assert all(len(POINTS[role]) >= 12 for role in ("controller", "actor", "critic", "rollout"))
