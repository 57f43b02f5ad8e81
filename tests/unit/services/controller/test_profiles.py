"""Profiles on demand: asked for while a step plays, recorded in the next, told once; and they change nothing."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from services.controller import telemetry
from services.controller.conductor import Conductor
from services.controller.profiles import Profiles
from services.controller.verbs import LOGPROBS, REFERENCE_LOGPROBS
from shared.rpc.errors import FailedPrecondition, NotFound
from shared.state import StateStore
from tests.fakes.sextet import FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller
from tests.unit.services.controller.test_failures import exported, undisturbed
from tests.unit.services.controller.test_lifecycle import holding

__all__ = ["undisturbed"]


async def ask(controller: Controller, role: str = "actor", steps: int = 1) -> "asyncio.Task[Any]":
    """Asks, and comes back when it has been asked for."""
    task = asyncio.create_task(controller.runs.profile("r", role, steps))
    assert controller.runs._active
    profiles = controller.runs._active.conductor._profiles
    await controller.until(lambda: bool(profiles._wanted) or task.done())
    return task


async def test_the_next_step_is_recorded_and_told(fakes: FakeSextet, controller: Controller, undisturbed: Any) -> None:
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 1)
    record = await controller.create("r")
    await reached.wait()
    asked = await ask(controller)
    go_on.set()
    (call,) = await asked
    await controller.over("r")
    assert (call.step, call.call, call.replica) == (2, "actor.update", "actor-0")
    traces = Path(record.directory) / "traces"
    assert [rank.path for rank in call.ranks] == [
        str(traces / f"step-2-actor.update-rank-{rank}.json.gz") for rank in (0, 1)
    ]
    events = [event async for event in controller.runs.watch("r", "") if event.kind == "profile"]
    assert [(event.step, event.message) for event in events] == [
        (2, f"actor.update on actor-0; 3.00 s, 2 ranks, 10% to 60% communication: {traces}")
    ]
    numbers = events[0].metrics
    assert (numbers["ranks"], numbers["seconds_min"], numbers["compute_share_max"]) == (2, 2.0, 0.8)
    shares = {
        (sample.labels["part"], sample.labels["rank"]): sample.value
        for sample in next(iter(telemetry.PROFILE.collect())).samples
        if sample.labels["call"] == "actor.update"
    }
    assert shares == {
        ("communication", "lowest"): 0.1, ("communication", "highest"): 0.6,
        ("compute", "lowest"): 0.3, ("compute", "highest"): 0.8,
    }  # fmt: skip
    # The same weights, to the bit.
    assert exported(record.directory) == undisturbed[0]


async def test_a_run_keeps_the_traces_that_were_recorded_last(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 1)
    record = await controller.create("r")
    await reached.wait()
    traces = Path(record.directory) / "traces"
    traces.mkdir()

    def left(step: int, role: str = "actor", age: int = 0) -> set[str]:
        """A recorded step, older than others."""
        names = {f"step-{step}-{role}.logprobs-rank-0.json.gz", f"step-{step}-{role}.update-2-rank-1.json.gz"}
        for name in names | {f".step-{step}-{role}.update-rank-0.json.gz.part"}:
            (traces / name).write_bytes(b"trace")
            os.utime(traces / name, (1e9 - age, 1e9 - age))
        return {path.name for path in traces.glob(f"*step-{step}-{role}.*")}

    # Step 40 was played again after the run had gone back to it from step 60.
    recorded = [40, *range(60, 49, -1), 9]
    actor = [left(step, age=place) for place, step in enumerate(recorded)]
    critic = left(1, "critic", age=99)
    (traces / "notes.txt").write_text("somebody's own")
    asked = await ask(controller)
    go_on.set()
    await asked
    await controller.over("r")
    kept = {path.name for path in traces.iterdir()}
    assert kept == set().union(*actor[:10], critic, {"notes.txt"})
    assert len(kept) == 3 * 11 + 1


async def test_who_asks_for_more_steps_gets_them_and_who_left_stops_nobody(
    fakes: FakeSextet, controller: Controller
) -> None:
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 1)
    await controller.create("r", total_steps=4)
    await reached.wait()
    actor, critic, left = await ask(controller, "actor", 2), await ask(controller, "critic"), await ask(controller)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    go_on.set()
    assert [(call.step, call.call) for call in await actor] == [(2, "actor.update"), (3, "actor.update")]
    assert [(call.step, call.call) for call in await critic] == [(2, "critic.update")]
    await controller.over("r")
    told = [step for kind, step, _ in await controller.events("r") if kind == "profile"]
    assert told == [2, 2, 3]


async def test_a_step_that_is_played_again_is_told_once(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    reached, go_on = holding(fakes, "actor-0", "update", 1)
    await controller.create("r")
    await reached.wait()
    asked = await ask(controller)
    critic = fakes["critic-0"]

    async def lose_it(request: Any) -> None:
        if request.operation.id.step == 2:
            critic.hooks.clear()
            await critic.kill()
            await critic.start()

    critic.hooks["update"] = lose_it
    go_on.set()
    # Back at the start, the next step is the first.
    assert [call.step for call in await asked] == [1]
    await controller.over("r")
    assert [step for kind, step, _ in await controller.events("r") if kind == "profile"] == [1]


async def test_a_profiler_that_fails_fails_the_question_and_not_the_run(
    fakes: FakeSextet, controller: Controller
) -> None:
    await fakes.start(*ALL)
    fakes["actor-0"].profile_fault = "OSError: [Errno 28] No space left on device"
    reached, go_on = holding(fakes, "actor-0", "update", 1)
    await controller.create("r")
    await reached.wait()
    asked = await ask(controller)
    go_on.set()
    with pytest.raises(
        FailedPrecondition, match=r"no trace was written: actor.update on actor-0: rank 0: OSError.* left"
    ):
        await asked
    assert (await controller.over("r")).state == "done"
    (message,) = [message for kind, _, message in await controller.events("r") if kind == "profile"]
    assert "rank 1: OSError" in message


async def test_what_can_not_be_profiled_is_said(fakes: FakeSextet, controller: Controller) -> None:
    await fakes.start(*ALL)
    with pytest.raises(NotFound, match="there is no run 'x'"):
        await controller.runs.profile("x", "actor", 1)
    reached, go_on = holding(fakes, "actor-0", "update", 1)
    await controller.create("r", total_steps=1, algorithm={"advantage": "grpo"}, flow="grpo")
    await reached.wait()
    with pytest.raises(FailedPrecondition, match="run 'r' has no critic: its roles are actor, reward, rollout"):
        await controller.runs.profile("r", "critic", 1)
    asked = await ask(controller)
    assert controller.runs._active
    conductor: Conductor = controller.runs._active.conductor
    go_on.set()
    with pytest.raises(FailedPrecondition, match="the run stopped before the step after this was asked for"):
        await asked
    with pytest.raises(FailedPrecondition, match="the run stopped"):
        await conductor.profile("actor", 1)
    await controller.over("r")
    with pytest.raises(FailedPrecondition, match="run 'r' is done: only a running one can be profiled"):
        await controller.runs.profile("r", "actor", 1)


async def test_the_next_controller_attaches_to_a_recorded_update(
    fakes: FakeSextet, store: StateStore, tmp_path: Path, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    async with Controller(store, tmp_path / "runs") as first:
        reached, go_on = holding(fakes, "actor-0", "update", 1)
        await first.create("r")
        await reached.wait()
        asked = await ask(first)
        second, finish = asyncio.Event(), asyncio.Event()

        async def hold(request: Any) -> None:
            if request.operation.id.step == 2:
                assert request.HasField("profile")
                second.set()
                await finish.wait()

        fakes["actor-0"].hooks["update"] = hold
        go_on.set()
        await second.wait()
    with pytest.raises(FailedPrecondition, match="the run stopped"):
        await asked
    async with Controller(store, tmp_path / "runs") as next_one:
        finish.set()
        record = await next_one.over("r")
        assert record.state == "done"
        assert exported(record.directory) == undisturbed[0]
        # Without going back: the update it asks for, unrecorded, is the same work.
        assert fakes["actor-0"].done["configure"] == 1


async def test_calls_of_one_name_have_traces_of_their_own(tmp_path: Path) -> None:
    async def tell(message: str, step: int, numbers: Any) -> None:
        raise AssertionError(message)

    profiles = Profiles(tmp_path, tell)
    asked = profiles.ask("reference", 1)
    profiles.begin()
    requests = [REFERENCE_LOGPROBS.request(operation={"id": {"step": 3}}) for _ in range(2)]
    other = LOGPROBS.request()
    for verb, request in ((REFERENCE_LOGPROBS, requests[0]), (LOGPROBS, other), (REFERENCE_LOGPROBS, requests[1])):
        profiles.mark(verb, request)
    names = [Path(request.profile.prefix).name for request in requests]
    assert names == ["step-3-reference.logprobs", "step-3-reference.logprobs-2"]
    assert not other.HasField("profile")
    asked.cancel()
