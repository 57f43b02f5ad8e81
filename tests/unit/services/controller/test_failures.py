"""Replicas that die, results that are lost, operations that take long: the run ends as if nothing had happened."""

import asyncio
import json
from typing import Any

import pytest

from services.controller import replica as replica_module
from services.controller.events import stream_key
from shared.rpc.errors import FailedPrecondition, GroupEnds, Internal, Unavailable
from tests.fakes.sextet import FakeRole, FakeSextet
from tests.unit.services.controller.conftest import ALL, Controller

TWO = (*ALL, "rollout-1", "reward-1", "reference-1")


def once(action: Any) -> Any:
    """A hook that acts the first time only."""
    done = False

    async def hook(request: Any) -> None:
        nonlocal done
        if not done:
            done = True
            await action(request)

    return hook


def killing(fake: FakeRole, at_step: int = 2) -> Any:
    done = False

    async def hook(request: Any) -> None:
        nonlocal done
        if not done and request.operation.id.step == at_step:
            done = True
            await fake.kill()
            await asyncio.sleep(60)

    return hook


async def outcome(controller: Controller, fakes: FakeSextet, id: str = "r", **changes: Any) -> tuple[str, str]:
    """Runs to the end; the models of actor and critic."""
    await controller.create(id, **changes)
    record = await controller.over(id)
    assert (record.state, record.reason) == ("done", "")
    return exported(record.directory), saved(record.directory, record.step)


def exported(directory: str) -> str:
    with open(f"{directory}/model/model.json") as file:
        return file.read()


def saved(directory: str, step: int) -> str:
    with open(f"{directory}/checkpoints/step_{step}/critic/state.json") as file:
        return file.read()


@pytest.fixture
async def undisturbed(store: Any, tmp_path: Any) -> tuple[str, str]:
    """What a run ends with when nothing happens."""
    from shared.state import open_store

    other = open_store("memory://undisturbed")
    fakes = FakeSextet(other)
    await fakes.start(*ALL)
    try:
        async with Controller(other, tmp_path / "undisturbed") as controller:
            return await outcome(controller, fakes)
    finally:
        await fakes.close()


async def test_the_number_of_replicas_changes_nothing(fakes: Any, controller: Any, undisturbed: Any) -> None:
    await fakes.start(*TWO)
    assert await outcome(controller, fakes) == undisturbed
    assert fakes["rollout-0"].done["generate"] == fakes["rollout-1"].done["generate"] == 3


@pytest.mark.parametrize("point", ["generate", "after generate"])
async def test_a_rollout_killed_in_a_step_loses_and_doubles_no_sample(
    fakes: Any, controller: Any, undisturbed: Any, point: str
) -> None:
    await fakes.start(*TWO)
    fakes["rollout-1"].hooks[point] = killing(fakes["rollout-1"])
    assert await outcome(controller, fakes) == undisturbed
    assert set(fakes["actor-0"].rows["update"].values()) == {1}
    assert len(fakes["actor-0"].rows["update"]) == 3 * 4 * 2
    assert any(kind == "recovery" for kind, _, _ in await controller.events("r"))


@pytest.mark.parametrize("name", ["reward-1", "reference-1"])
async def test_a_stateless_replica_killed_in_a_step(fakes: Any, controller: Any, undisturbed: Any, name: str) -> None:
    await fakes.start(*TWO)
    operation = {"reward-1": "score", "reference-1": "logprobs"}[name]
    fakes[name].hooks[operation] = killing(fakes[name])
    assert await outcome(controller, fakes) == undisturbed


async def test_the_only_rollout_restarts_and_takes_the_present_weights(
    fakes: Any, controller: Any, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    rollout = fakes["rollout-0"]

    async def restart(request: Any) -> None:
        if request.operation.id.step == 2:
            rollout.hooks.clear()
            asyncio.get_running_loop().call_later(0.3, lambda: tasks.append(asyncio.create_task(rollout.start())))
            await rollout.kill()
            await asyncio.sleep(60)

    tasks: list[Any] = []
    rollout.hooks["generate"] = restart
    assert await outcome(controller, fakes) == undisturbed
    # Versions 1 to 3, and version 1 once more for the new process.
    assert rollout.done["commit_weights"] == 4
    told = [message for kind, _, message in await controller.events("r") if kind == "recovery"]
    assert any("its share waits until a rollout is ready again" in message for message in told)
    assert not any("goes to the others" in message for message in told)


async def test_samples_lost_after_they_were_made_are_made_again_elsewhere(
    fakes: Any, controller: Any, undisturbed: Any
) -> None:
    await fakes.start(*TWO)
    killed = fakes["rollout-1"]

    async def kill(request: Any) -> None:
        if request.operation.id.step == 2:
            await killed.kill()

    # All samples of step 2 are made by now; those of rollout-1 vanish before anybody has read them all.
    fakes["critic-0"].hooks["values"] = kill
    assert await outcome(controller, fakes) == undisturbed
    assert any("made again" in message for _, _, message in await controller.events("r"))


async def test_scores_lost_after_they_were_made_are_made_again(fakes: Any, controller: Any, undisturbed: Any) -> None:
    await fakes.start(*TWO)

    async def kill(request: Any) -> None:
        if request.operation.id.step == 2:
            await fakes["reward-1"].kill()

    fakes["actor-0"].hooks["advantages"] = kill
    assert await outcome(controller, fakes) == undisturbed


async def test_a_long_operation_is_attached_to_again(
    fakes: Any, controller: Any, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "ATTEMPT_SECONDS", 0.2)
    await fakes.start(*ALL)
    fakes["actor-0"].hooks["update"] = lambda request: asyncio.sleep(0.7)
    assert await outcome(controller, fakes) == undisturbed
    assert fakes["actor-0"].done["update"] == 3


async def test_failures_that_pass_are_tried_again_with_the_same_id(
    fakes: Any, controller: Any, undisturbed: Any
) -> None:
    await fakes.start(*ALL)
    seen = []

    async def fail_twice(request: Any) -> None:
        seen.append((request.operation.id.step, request.operation.id.part))
        if len(seen) < 3:
            raise Unavailable("the grader is away")

    fakes["reward-0"].hooks["score"] = fail_twice
    assert await outcome(controller, fakes) == undisturbed
    assert len(seen) == 5
    assert len(set(seen)) == 3


async def test_a_group_that_ends_again_and_again_fails_the_run_with_what_it_said(
    fakes: Any, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fakes.start(*ALL)
    actor, said, restarts = fakes["actor-0"], "rank 1 failed: out of memory: lower micro_batch_size to 1", []

    async def restart() -> None:
        await asyncio.sleep(0.3)
        await actor.kill()
        await actor.start()

    async def end(request: Any) -> None:
        monkeypatch.setattr(actor.servicer._ranks, "end", said)
        restarts.append(asyncio.create_task(restart()))
        raise GroupEnds(said)

    actor.hooks["update"] = end
    await controller.create("r", recovery__max_retries=1)
    record = await controller.over("r")
    await asyncio.gather(*restarts)
    assert record.state == "failed"
    lost = f"actor was restarted (it ended with: {said})"
    assert lost in record.reason
    assert len(restarts) == 2
    assert any(kind == "warning" and lost in message for kind, _, message in await controller.events("r"))


async def test_a_grader_that_stays_away_fails_the_run_with_its_words(fakes: Any, controller: Controller) -> None:
    await fakes.start(*ALL)

    async def fail(request: Any) -> None:
        raise Unavailable("reward.endpoint=http://nowhere does not answer")

    fakes["reward-0"].hooks["score"] = fail
    await controller.create("r", recovery__max_retries=1)
    record = await controller.over("r")
    assert record.state == "failed"
    assert "reward.endpoint=http://nowhere does not answer" in record.reason
    assert fakes["actor-0"].done["update"] == 0


async def test_a_defect_in_one_call_cancels_the_rest_and_names_the_call(fakes: Any, controller: Controller) -> None:
    await fakes.start(*ALL)

    async def fail(request: Any) -> None:
        raise Internal("cuda is on fire")

    fakes["reference-0"].hooks["logprobs"] = fail
    await controller.create("r", recovery__max_retries=0)
    record = await controller.over("r")
    assert (record.state, record.reason) == ("failed", "reference.logprobs: cuda is on fire")


async def test_a_refusal_of_the_work_ends_the_run_at_once(fakes: Any, controller: Controller) -> None:
    await fakes.start(*ALL)
    asked = 0

    async def refuse(request: Any) -> None:
        nonlocal asked
        asked += 1
        raise FailedPrecondition("reward.function=a:b graded none of 8 responses: KeyError: 'answer'")

    fakes["reward-0"].hooks["score"] = refuse
    await controller.create("r")
    record = await controller.over("r")
    assert record.state == "failed"
    assert "graded none of 8 responses" in record.reason
    assert asked == 1


async def test_what_a_replica_with_a_fault_refuses_is_done_by_another(
    fakes: Any, controller: Any, undisturbed: Any
) -> None:
    await fakes.start(*TWO)

    async def break_down(request: Any) -> None:
        if request.operation.id.step == 2:
            fakes["rollout-1"].now_fault = "the engine is dead"
            raise FailedPrecondition("the engine is dead")

    fakes["rollout-1"].hooks["generate"] = break_down
    assert await outcome(controller, fakes) == undisturbed
    told = [message for kind, _, message in await controller.events("r") if kind == "recovery"]
    assert len(told) == 1
    assert "has a fault: the engine is dead" in told[0]
    assert "its share goes to the others" in told[0]


@pytest.mark.parametrize("point", ["update", "applied", "after update", "values"])
@pytest.mark.parametrize("role", ["actor", "critic"])
async def test_a_learning_role_restarts_and_the_run_goes_back_to_the_checkpoint(
    fakes: Any, controller: Any, undisturbed: Any, role: str, point: str
) -> None:
    await fakes.start(*ALL)
    learner = fakes[f"{role}-0"]
    point = "logprobs" if (role, point) == ("actor", "values") else point

    async def restart(request: Any) -> None:
        if request.operation.id.step == 3:
            learner.hooks.clear()
            await controller.until((controller.root / "r" / "checkpoints" / "step_2" / "run.json").exists)
            asyncio.get_running_loop().call_later(0.2, lambda: tasks.append(asyncio.create_task(learner.start())))
            await learner.kill()
            await asyncio.sleep(60)

    tasks: list[Any] = []
    learner.hooks[point] = restart
    assert await outcome(controller, fakes) == undisturbed
    recoveries = [message for kind, _, message in await controller.events("r") if kind == "recovery"]
    assert any("goes on from step 2" in message for message in recoveries)


async def test_without_a_checkpoint_the_run_begins_again(fakes: Any, controller: Any, undisturbed: Any) -> None:
    await fakes.start(*ALL)
    actor = fakes["actor-0"]

    async def restart(request: Any) -> None:
        if request.operation.id.step == 2:
            actor.hooks.clear()
            await actor.kill()
            tasks.append(asyncio.create_task(actor.start()))
            await asyncio.sleep(60)

    tasks: list[Any] = []
    actor.hooks["update"] = restart
    assert await outcome(controller, fakes, checkpoint__save_interval=100) == undisturbed


async def test_a_missing_role_is_named(fakes: Any, controller: Controller) -> None:
    await fakes.start(*ALL[:3], "reference-0")
    await controller.create("r", recovery__replica_timeout=0.3)
    record = await controller.over("r")
    assert record.state == "failed"
    assert "no reward replica is ready" in record.reason
    assert "python -m services.reward" in record.reason


async def test_a_refused_configuration_fails_the_run_in_the_roles_words(fakes: Any, controller: Controller) -> None:
    await fakes.start(*ALL)
    fakes["rollout-0"].refuse_configure = "model.path: 'm' does not exist"
    await controller.create("r")
    record = await controller.over("r")
    assert record.state == "failed"
    assert "model.path: 'm' does not exist" in record.reason


async def test_a_new_rollout_joins_the_run(fakes: Any, controller: Any, undisturbed: Any) -> None:
    await fakes.start(*ALL)
    gate = asyncio.Event()

    async def join(request: Any) -> None:
        await fakes.start("rollout-1")
        late = fakes["rollout-1"]
        await controller.until(lambda: late.now_version == 1)
        gate.set()

    async def at_step_two(request: Any) -> None:
        if request.operation.id.step == 2 and not gate.is_set():
            await join(request)

    fakes["critic-0"].hooks["values"] = at_step_two
    assert await outcome(controller, fakes) == undisturbed
    assert fakes["rollout-1"].done["generate"] == 1


async def test_rollouts_that_are_ahead_of_a_run_that_goes_back_get_its_weights_again(
    fakes: Any, store: Any, tmp_path: Any, undisturbed: Any
) -> None:
    """A step is taken up whose weights rollouts serve already; then its inputs turn out to be others."""
    await fakes.start(*ALL)
    committed, rollout, reward = asyncio.Event(), fakes["rollout-0"], fakes["reward-0"]

    async def hang(request: Any) -> None:
        committed.set()
        await asyncio.sleep(60)

    rollout.hooks["after commit_weights"] = hang
    async with Controller(store, tmp_path / "runs") as first:
        await first.create("r")
        async with asyncio.timeout(30):
            await committed.wait()
    rollout.hooks.clear()
    await reward.kill()
    await reward.start()
    async with Controller(store, tmp_path / "runs") as second:
        assert await outcome(second, fakes) == undisturbed
        assert any("called before with another payload" in message for _, _, message in await second.events("r"))


async def test_a_frozen_replica_is_found_by_its_lease(fakes: Any, controller: Any, undisturbed: Any) -> None:
    await fakes.start(*TWO)
    frozen = fakes["rollout-1"]
    asleep = asyncio.Event()

    async def freeze(request: Any) -> None:
        if request.operation.id.step == 2:
            # What SIGSTOP does: connections stay open, nothing is answered, no lease is renewed.
            frozen.hooks["describe"] = lambda request: asyncio.sleep(60)
            frozen.registration._task.cancel()
            asleep.set()
            await asyncio.sleep(60)

    frozen.hooks["generate"] = freeze
    running = asyncio.create_task(outcome(controller, fakes))
    await asyncio.wait_for(asleep.wait(), 20)
    started = asyncio.get_running_loop().time()
    assert await running == undisturbed
    assert asyncio.get_running_loop().time() - started < 40
    assert set(fakes["actor-0"].rows["update"].values()) == {1}


async def test_a_draining_replica_gets_nothing_new(fakes: Any, controller: Any, undisturbed: Any) -> None:
    await fakes.start(*TWO)
    before = 0

    async def drain(request: Any) -> None:
        nonlocal before
        if request.operation.id.step == 1:
            await fakes["rollout-1"].registration.drain()
            member = controller.cluster.pools["rollout"]._members["rollout-1"]
            await controller.until(lambda: not member.usable)
            before = fakes["rollout-1"].done["generate"]

    fakes["actor-0"].hooks["update"] = drain
    assert await outcome(controller, fakes) == undisturbed
    assert fakes["rollout-1"].done["generate"] == before == 1


async def test_a_replica_with_a_fault_gets_nothing_new(fakes: Any, controller: Any, undisturbed: Any) -> None:
    await fakes.start(*TWO)
    fakes["rollout-1"].now_fault = "the engine is dead"
    members = controller.cluster.pools["rollout"]._members
    await controller.until(lambda: "rollout-1" in members and members["rollout-1"].info.state == "suspect")
    assert await outcome(controller, fakes) == undisturbed
    assert fakes["rollout-1"].done["generate"] == 0


async def test_an_actor_killed_while_its_weights_are_fetched_costs_a_rollback_and_no_deadline(
    fakes: Any, controller: Any, undisturbed: Any
) -> None:
    """Found by the kill matrix at weights.sent@actor: rollouts waited for weights that nobody had any more."""
    await fakes.start(*ALL)
    actor, restarting = fakes["actor-0"], []

    async def restart() -> None:
        await actor.kill()
        await asyncio.sleep(0.3)
        await actor.start()

    async def fetch(request: Any) -> None:
        # Of the first take: what the dead actor had published.
        if request.operation.id.step == 2 and request.operation.id.part.startswith("0."):
            if not restarting:
                restarting.append(asyncio.create_task(restart()))
            await asyncio.sleep(0.2)
            raise Unavailable("the holder cannot be reached")

    fakes["rollout-0"].hooks["prepare_weights"] = fetch
    async with asyncio.timeout(50):
        assert await outcome(controller, fakes) == undisturbed
    await asyncio.gather(*restarting)


async def test_a_rollout_that_comes_back_for_weights_of_an_actor_that_died_too_is_not_waited_for(
    fakes: Any, controller: Any, undisturbed: Any
) -> None:
    """Found by test_samples_drawn_once: the run waited for the rollout, and failed after `recovery.replica_timeout`."""
    await fakes.start(*ALL)
    rollout, actor, restarting = fakes["rollout-0"], fakes["actor-0"], []

    async def restart() -> None:
        await rollout.kill()
        await actor.kill()
        await rollout.start()
        await asyncio.sleep(0.3)
        await actor.start()

    async def generate(request: Any) -> None:
        if request.operation.id.step == 3 and not restarting:
            restarting.append(asyncio.create_task(restart()))
            await asyncio.sleep(60)

    async def fetch(request: Any) -> None:
        if restarting and request.operation.id.part.startswith("0."):
            raise Unavailable("the holder cannot be reached")

    rollout.hooks |= {"generate": generate, "prepare_weights": fetch}
    async with asyncio.timeout(50):
        assert await outcome(controller, fakes) == undisturbed
    await asyncio.gather(*restarting)


async def test_samples_of_an_engine_that_draws_anew_are_asked_of_the_replica_that_has_them(
    fakes: Any, controller: Any
) -> None:
    await fakes.start(*TWO)
    killed, asked, restarting = fakes["rollout-1"], [], []
    for name in ("rollout-0", "rollout-1"):
        fakes[name].facts = {"batch_invariant": "false"}

        async def generate(request: Any, name: str = name) -> None:
            if "again" in request.operation.id.part:
                asked.append(name)

        fakes[name].hooks["generate"] = generate

    async def restart() -> None:
        await killed.kill()
        await asyncio.sleep(0.5)
        await killed.start()

    async def kill(request: Any) -> None:
        if request.operation.id.step == 2 and not restarting:
            restarting.append(asyncio.create_task(restart()))
            await asyncio.sleep(0.2)

    fakes["critic-0"].hooks["values"] = kill
    await outcome(controller, fakes)
    await asyncio.gather(*restarting)
    assert set(asked) == {"rollout-1"}


async def test_a_role_at_another_version_than_the_run_takes_it_back_to_the_checkpoint(
    fakes: Any, controller: Any, undisturbed: Any
) -> None:
    """Whatever moved it: an update on top of it would be one step too many."""
    await fakes.start(*ALL)
    moved: list[bool] = []

    async def move(request: Any) -> None:
        if request.operation.id.step == 3 and not moved:
            moved.append(True)
            fakes["actor-0"].now_version += 1

    fakes["critic-0"].hooks["values"] = move
    assert await outcome(controller, fakes) == undisturbed
    assert any("for version 2, and this is 3" in message for _, _, message in await controller.events("r"))


async def test_a_recovery_says_why_how_long_and_what_it_cost(fakes: Any, controller: Any, store: Any) -> None:
    await fakes.start(*TWO)
    fakes["actor-0"].hooks["update"] = killing(fakes["actor-0"], 3)
    fakes["rollout-1"].hooks["generate"] = killing(fakes["rollout-1"], 1)

    async def restart() -> None:
        while fakes["actor-0"].alive:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await fakes["actor-0"].start()

    restarting = asyncio.create_task(restart())
    await outcome(controller, fakes, checkpoint__save_interval=1)
    await restarting
    entries = [fields for _, fields in await store.read(stream_key("r"), "", 0.0) if fields["kind"] == "recovery"]
    told = [(fields["message"], json.loads(fields["metrics"])) for fields in entries]
    share = next(numbers for message, numbers in told if "rollout-1" in message)
    back = next(numbers for message, numbers in told if "goes on from step 2" in message)
    assert share["lost_load"] > 0
    assert share["lost_seconds"] >= 0
    assert back["seconds"] > 0
    assert back["lost_steps"] == 0
    assert back["lost_seconds"] > 0
