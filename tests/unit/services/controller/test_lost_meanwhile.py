"""Replicas that are lost where a run stands outside of its steps: while it is set up, or validated."""

import asyncio
from typing import Any

from services.controller.replica import Phase
from shared.rpc.errors import Internal
from tests.fakes.sextet import FakeRole, FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller


async def test_an_actor_lost_while_a_run_is_set_up_the_first_time_costs_no_run(
    fakes: FakeSextet, controller: Controller
) -> None:
    """What the rollout had said of its dataset was lost with the first attempt: KeyError('rollout')."""
    await fakes.start(*ALL)
    actor, restarting = fakes["actor-0"], []

    async def restart() -> None:
        await actor.kill()
        await actor.start()

    async def configure(request: Any) -> None:
        actor.hooks.clear()
        await controller.until(lambda: all(fakes[name].done["configure"] for name in ALL if name[0] == "r"))
        restarting.append(asyncio.create_task(restart()))
        await asyncio.sleep(60)

    actor.hooks["configure"] = configure
    await controller.create("r")
    record = await controller.over("r")
    await asyncio.gather(*restarting)
    assert (record.state, record.reason) == ("done", "")


async def test_validation_samples_that_come_out_differently_are_made_anew_and_cost_no_run(
    fakes: FakeSextet, controller: Controller
) -> None:
    """Outside of a step nobody heeded StepChanged: the run ended of it."""
    await fakes.start(*ALL, "rollout-1")
    for name in ("rollout-0", "rollout-1"):
        fakes[name].facts = {"validation_rows": "4"}

    async def kill(request: Any) -> None:
        if request.inputs.blocks[0].rows[0].uid.startswith("validation:") and fakes["rollout-1"].alive:
            await fakes["rollout-1"].kill()
            # As an engine whose numbers depend on who shares a batch.
            fakes["rollout-0"].response_tokens += 1

    fakes["reward-0"].hooks["score"] = kill
    await controller.create("r", data__validation_path="v", data__validation_interval=1)
    record = await controller.over("r")
    assert (record.state, record.reason) == ("done", "")
    warnings = [message for kind, _, message in await controller.events("r") if kind == "warning"]
    assert any("validation after step 0 failed: samples of rollout" in message for message in warnings)


async def test_a_sampling_beside_one_that_failed_does_not_outlive_the_step(
    fakes: FakeSextet, controller: Controller
) -> None:
    """It went on beside the step that was played again, and its load was taken off the replica twice."""
    await fakes.start("rollout-0", "actor-0", "reward-0")
    again, parts = asyncio.Event(), []

    async def generate(request: Any) -> None:
        if request.greedy:
            await again.wait()
            return
        parts.append(request.operation.id.part)
        if len(parts) == 1:
            raise Internal("out of memory")
        again.set()

    fakes["rollout-0"].hooks["generate"] = generate
    await controller.create("r", flow="remax", algorithm={"advantage": "remax"}, total_steps=1)
    await controller.until(again.is_set)
    await controller.until(lambda: bool(fakes["actor-0"].done["update"]))
    loads = [member.load for member in controller.cluster.pools["rollout"].members]
    record = await controller.over("r")
    assert (record.state, record.reason) == ("done", "")
    assert loads == [0]


async def test_a_rollout_that_refuses_the_run_does_not_end_it_while_a_lost_one_comes_back(
    fakes: FakeSextet, controller: Controller
) -> None:
    """Its refusal was raised at once for the rows that the only ready one had lost."""
    await fakes.start(*ALL)
    rollout, restarting = fakes["rollout-0"], []

    async def restart() -> None:
        await rollout.kill()
        await asyncio.sleep(0.3)
        await rollout.start()

    async def generate(request: Any) -> None:
        if request.operation.id.step == 2 and not restarting:
            other = fakes.replicas["rollout-1"] = FakeRole(fakes.store, "rollout", "rollout-1")
            other.refuse_configure = "model.path='m' is not here"
            await other.start()
            pool = controller.cluster.pools["rollout"]
            await controller.until(lambda: any(member.phase is Phase.REFUSED for member in pool.members))
            restarting.append(asyncio.create_task(restart()))
            await asyncio.sleep(60)

    rollout.hooks["generate"] = generate
    await controller.create("r")
    record = await controller.over("r")
    await asyncio.gather(*restarting)
    assert (record.state, record.reason) == ("done", "")
