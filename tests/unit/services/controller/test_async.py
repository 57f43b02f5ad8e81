"""Samples that are older than the policy: sampled ahead, or cut and gone on with. Orders, bounds, deaths, restarts."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from services.controller.prompts import DatasetOrder, Prompt, PromptSource
from services.controller.stock import Stock, Waiting
from shared.rpc.errors import InvalidArgument, Unavailable
from shared.state import StateStore, open_store
from tests.fakes.sextet import DATASET_ROWS, FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller
from tests.unit.services.controller.test_failures import exported, killing, saved
from tests.unit.services.controller.test_random_failures import OPERATIONS, arm

BATCH, N, STEPS = 4, 2, 5


def changes(staleness: int = 1, budget: int = 0, flow: str = "async_ppo", **more: Any) -> dict[str, Any]:
    return {
        "flow": flow,
        "total_steps": STEPS,
        "algorithm": {"staleness": staleness, "kl": {"placement": "loss"}},
        "rollout": {"n": N, "budget": budget},
        **more,
    }


async def start(fakes: FakeSextet, *more: str) -> None:
    """All roles; samples have from 1 to 12 tokens."""
    for fake in await fakes.start(*ALL, *more):
        fake.long_tail = True


async def played(controller: Controller, id: str = "r", **more: Any) -> tuple[str, str]:
    await controller.create(id, **more)
    record = await controller.over(id)
    assert (record.state, record.reason) == ("done", "")
    return exported(record.directory), saved(record.directory, record.step)


def lines(controller: Controller, id: str = "r") -> list[dict[str, Any]]:
    return [json.loads(text) for text in (controller.root / id / "metrics.jsonl").read_text().splitlines()]


def drawn(count: int) -> list[int]:
    """Dataset rows in the order in which a run takes them."""
    order = DatasetOrder(DATASET_ROWS, 0, True)
    return [prompt.index for prompt in PromptSource(order, N).take(1, count)]


def trained(fakes: FakeSextet) -> list[int]:
    """Dataset rows that were trained, each once per prompt; fails when a row was trained twice."""
    rows = fakes["actor-0"].rows["update"]
    assert set(rows.values()) == {1}
    prompts = {key.uid for key in rows}
    assert len(rows) == N * len(prompts)
    return sorted(int(uid.split(":")[1]) for uid in prompts)


async def undisturbed(mode: str, root: Path) -> tuple[str, str]:
    """What a run of this mode gives in another cluster where nothing happens."""
    if mode not in _undisturbed:
        store = open_store(f"memory://undisturbed-{mode}")
        fakes = FakeSextet(store)
        await start(fakes)
        async with Controller(store, root / "undisturbed") as controller:
            _undisturbed[mode] = await played(controller, **MODES[mode])
        await fakes.close()
    return _undisturbed[mode]


_undisturbed: dict[str, tuple[str, str]] = {}
MODES = {
    "ahead": changes(),
    "two ahead, cut": changes(staleness=2, budget=3),
    "cut": changes(flow="ppo", budget=3),
    "cut, two steps": changes(flow="ppo", budget=1, staleness=2),
}
CUT = ["two ahead, cut", "cut, two steps"]


@pytest.mark.parametrize("mode", MODES)
async def test_every_drawn_prompt_is_trained_once_and_none_too_late(
    fakes: FakeSextet, controller: Controller, mode: str
) -> None:
    await start(fakes, "rollout-1")
    await played(controller, **MODES[mode])
    assert trained(fakes) == sorted(drawn(BATCH * STEPS))
    bound = MODES[mode]["algorithm"]["staleness"]
    prefix = "rollout.ready" if "ahead" in mode else "rollout.generate"
    ages = [line[f"{prefix}/staleness_max"] for line in lines(controller)]
    assert (ages[0], max(ages)) == (0, bound)
    # What the trained tokens themselves say: the policy has one version more after each step.
    assert ages == fakes["actor-0"].ages_seen
    waiting = max(line.get("rollout.generate/prompts_waiting", 0) for line in lines(controller))
    in_training = BATCH if "ahead" in mode else 0
    assert waiting + in_training <= (1 + bound) * BATCH


async def test_the_next_batch_is_sampled_while_this_one_is_trained(fakes: FakeSextet, controller: Controller) -> None:
    await start(fakes)
    updating, sampling = asyncio.Event(), asyncio.Event()

    async def update(request: Any) -> None:
        if request.operation.id.step == 2:
            updating.set()
            await asyncio.wait_for(sampling.wait(), 60)

    async def generate(request: Any) -> None:
        if request.operation.id.step == 2:
            await asyncio.wait_for(updating.wait(), 60)
            sampling.set()

    fakes["actor-0"].hooks["update"], fakes["rollout-0"].hooks["generate"] = update, generate
    await played(controller, **changes())
    assert updating.is_set()
    assert sampling.is_set()
    assert lines(controller)[1]["overlap/share"] > 0


async def test_weights_wait_for_the_sampling(fakes: FakeSextet, controller: Controller) -> None:
    await start(fakes)
    order: list[str] = []

    def noting(what: str, after: str = "") -> Any:
        async def hook(request: Any) -> None:
            if request.operation.id.step == 3:
                await controller.until(lambda: not after or after in order)
                order.append(what)

        return hook

    fakes["rollout-0"].hooks["after generate"] = noting("sampled", after="updated")
    fakes["rollout-0"].hooks["prepare_weights"] = noting("new weights")
    fakes["actor-0"].hooks["after update"] = noting("updated")
    await played(controller, **changes())
    assert order == ["updated", "sampled", "new weights"]


@pytest.mark.parametrize("mode", CUT)
@pytest.mark.parametrize("point", ["generate", "after generate", "prepare_weights"])
async def test_a_rollout_that_dies_costs_no_row(
    fakes: FakeSextet, controller: Controller, tmp_path: Path, mode: str, point: str
) -> None:
    wanted = await undisturbed(mode, tmp_path)
    await start(fakes, "rollout-1")
    fakes["rollout-1"].hooks[point] = killing(fakes["rollout-1"], at_step=2)
    assert await played(controller, **MODES[mode]) == wanted
    assert trained(fakes) == sorted(drawn(BATCH * STEPS))


@pytest.mark.parametrize("mode", CUT)
@pytest.mark.parametrize(("role", "point"), [
    ("rollout-0", "generate"), ("rollout-0", "after generate"), ("actor-0", "hold"), ("actor-0", "after hold"),
    ("actor-0", "update"), ("actor-0", "after update"), ("critic-0", "after update"), ("rollout-0", "commit_weights"),
])  # fmt: skip
async def test_a_controller_that_dies_skips_no_prompt_and_trains_none_twice(
    fakes: FakeSextet, store: StateStore, tmp_path: Path, mode: str, role: str, point: str
) -> None:
    wanted = await undisturbed(mode, tmp_path)
    await start(fakes)
    reached = asyncio.Event()

    async def stop(request: Any) -> None:
        if request.operation.id.step == 3:
            reached.set()
            await asyncio.sleep(0.2)

    fakes[role].hooks[point] = stop
    async with Controller(store, tmp_path / "runs") as first:
        await first.create("r", **MODES[mode])
        await asyncio.wait_for(reached.wait(), 20)
    fakes[role].hooks.clear()
    async with Controller(store, tmp_path / "runs") as second:
        record = await second.over("r")
        assert (record.state, record.reason) == ("done", "")
        assert (exported(record.directory), saved(record.directory, STEPS)) == wanted
    assert trained(fakes) == sorted(drawn(BATCH * STEPS))


@pytest.mark.parametrize("seed", range(8))
async def test_random_deaths_change_nothing(fakes: FakeSextet, store: StateStore, tmp_path: Path, seed: int) -> None:
    choose, mode, tasks = random.Random(seed), CUT[seed % 2], []
    wanted = await undisturbed(mode, tmp_path)
    await start(fakes, "rollout-1", "reward-1")
    rollouts_die = seed < 4
    for _ in range(4):
        name = choose.choice(["reward-0", "reward-1", "reference-0", *["rollout-0", "rollout-1"] * rollouts_die])
        operation = choose.choice(OPERATIONS[fakes[name].role])
        arm(fakes[name], operation, choose.randrange(4), choose.choice(["kill", "kill", "slow"]), Unavailable, tasks)
    changes = MODES[mode] | {"recovery": {"max_retries": 6, "backoff": 1.0, "replica_timeout": 5.0}}
    async with Controller(store, tmp_path / "runs") as first:
        await first.create("r", **changes)
        if rollouts_die:
            # Rows that were cut, and their rollout and the controller are gone in the same step: they would be drawn
            # again by weights that may be newer (docs/reliability.md).
            await first.over("r")
        else:
            await asyncio.sleep(choose.uniform(0, 1))
    async with Controller(store, tmp_path / "runs") as second:
        record = await second.over("r")
        assert (record.state, record.reason) == ("done", "")
        assert (exported(record.directory), saved(record.directory, STEPS)) == wanted
        told = [message for _, _, message in await second.events("r") if message.startswith("goes on from step")]
    # Back at a checkpoint, what had been trained is trained again.
    if all(message.endswith("taken up again") for message in told):
        assert trained(fakes) == sorted(drawn(BATCH * STEPS))
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("mode", MODES)
async def test_back_at_a_checkpoint_what_was_in_flight_is_sampled_anew(
    fakes: FakeSextet, controller: Controller, mode: str
) -> None:
    await start(fakes)
    actor = fakes["actor-0"]

    async def die(request: Any) -> None:
        if request.operation.id.step == 4:
            actor.hooks.clear()
            # What it trained since the checkpoint of step 2 is forgotten with it.
            actor.rows.clear()
            await actor.kill()
            asyncio.get_running_loop().call_later(0.2, lambda: tasks.append(asyncio.create_task(actor.start())))
            await asyncio.sleep(60)

    tasks: list[Any] = []
    actor.hooks["update"] = die
    await played(controller, **MODES[mode])
    steps = {line["step"] for line in lines(controller)}
    assert steps == {1, 2, 3, 4, 5}
    # Steps 3 to 5 train what was not trained up to the checkpoint.
    assert len(trained(fakes)) == 3 * BATCH


async def test_what_it_refuses(controller: Controller) -> None:
    with pytest.raises(InvalidArgument, match=r"set algorithm\.staleness to 1 or more, or flow: ppo"):
        await controller.create(**changes(staleness=0))
    with pytest.raises(InvalidArgument, match=r"rollout\.budget=3 lets samples wait .* set algorithm\.staleness"):
        await controller.create(**changes(staleness=0, budget=3, flow="ppo"))
    with pytest.raises(InvalidArgument, match=r"rollout\.pieces=2 must be 1"):
        await controller.create(**changes() | {"rollout": {"pieces": 2}})
    with pytest.raises(InvalidArgument, match="exclude each other"):
        await controller.create(**changes(budget=3) | {"rollout": {"budget": 3, "pieces": 2}})


async def test_correction_is_on_unless_said_otherwise(fakes: FakeSextet, controller: Controller) -> None:
    await start(fakes)
    await played(controller, **changes())
    assert fakes["actor-0"].config.algorithm.correction.mode == "decoupled"
    assert fakes["actor-0"].config.algorithm.correction.token_cap == 2
    await played(controller, "none", **changes(algorithm={"staleness": 1, "correction": {"mode": "none"}}))
    assert fakes["actor-0"].config.algorithm.correction.mode == "none"


@pytest.mark.parametrize(("limit", "since"), [(0, 9), (1, 6), (2, 3), (3, 0), (9, 0)])
def test_a_version_is_too_old_when_more_updates_came_after_it(limit: int, since: int) -> None:
    """As `age` counts: a token of version 3 has seen the updates to 6 and 9."""
    stock = Stock(updates=[3, 6, 9])
    assert stock.since(limit) == since
    for oldest in range(10):
        sampled = Waiting(Prompt("1:0:0", 0, (0,)), (oldest,), (True,))
        assert (stock.age(sampled) <= limit) == (oldest >= since)
