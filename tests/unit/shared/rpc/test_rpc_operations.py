"""Law 3: done once, attached, stored, refused, fenced, and never stopped by a caller."""

import asyncio
import contextlib
from typing import Any

import pytest

from shared.gen.sextet.v1 import actor_pb2, common_pb2, role_pb2
from shared.rpc import errors
from shared.rpc.operations import Operations, payload_digest


def request(name: str = "actor.export", step: int = 1, part: str = "", epoch: int = 1, payload: str = "p") -> Any:
    made = actor_pb2.ExportModelRequest(directory=payload)
    made.operation.id.run = "r"
    made.operation.id.step = step
    made.operation.id.name = name
    made.operation.id.part = part
    made.operation.epoch = epoch
    return made


class Work:
    """Counts how often it ran; waits for `gate` when it has one; raises `failure` when it has one."""

    def __init__(self, gate: asyncio.Event | None = None, failure: Exception | None = None) -> None:
        self.runs, self.gate, self.failure = 0, gate, failure
        self.begun = asyncio.Event()

    async def __call__(self) -> Any:
        self.runs += 1
        self.begun.set()
        if self.gate:
            await self.gate.wait()
        if self.failure:
            raise self.failure
        return actor_pb2.ExportModelResponse(directory=f"result {self.runs}")


async def test_second_call_gets_the_stored_result() -> None:
    operations, work = Operations(), Work()
    first = await operations.run(request(), work)
    assert await operations.run(request(), work) is first
    assert work.runs == 1


async def test_concurrent_calls_attach_to_one_piece_of_work() -> None:
    operations, work = Operations(), Work(gate=asyncio.Event())
    calls = [asyncio.create_task(operations.run(request(), work)) for _ in range(5)]
    await work.begun.wait()
    assert [o.name for o in operations.running()] == ["actor.export"]
    assert work.gate
    work.gate.set()
    assert {answer.directory for answer in await asyncio.gather(*calls)} == {"result 1"}
    assert operations.running() == []


async def test_a_cancelled_attempt_leaves_the_work_alive() -> None:
    operations, work = Operations(), Work(gate=asyncio.Event())
    attempt = asyncio.create_task(operations.run(request(), work))
    await work.begun.wait()
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert work.gate
    work.gate.set()
    assert (await operations.run(request(), work)).directory == "result 1"
    assert work.runs == 1


async def test_a_failure_nobody_listened_to_is_tried_again() -> None:
    operations = Operations()
    failing = Work(gate=asyncio.Event(), failure=errors.Unavailable("peer"))
    attempt = asyncio.create_task(operations.run(request(), failing))
    await failing.begun.wait()
    attempt.cancel()
    assert failing.gate
    failing.gate.set()
    await asyncio.sleep(0)
    assert (await operations.run(request(), Work())).directory == "result 1"


async def test_other_payload_is_refused_even_after_a_failure() -> None:
    operations = Operations()
    with pytest.raises(errors.Unavailable):
        await operations.run(request(), Work(failure=errors.Unavailable("peer")))
    with pytest.raises(errors.PayloadMismatch, match=r"actor\.export of step 1"):
        await operations.run(request(payload="q"), Work())
    assert (await operations.run(request(), Work())).directory == "result 1"
    with pytest.raises(errors.PayloadMismatch):
        await operations.run(request(payload="q"), Work())
    assert (await operations.run(request(part="2", payload="q"), Work())).directory == "result 1"


async def test_partly_applied_work_is_never_tried_again() -> None:
    operations, again = Operations(), Work()
    with pytest.raises(errors.PartlyApplied):
        await operations.run(request(), Work(failure=errors.PartlyApplied("optimizer stepped, then out of memory")))
    with pytest.raises(errors.PartlyApplied, match="out of memory"):
        await operations.run(request(), again)
    assert again.runs == 0
    operations.restart("r")
    await operations.run(request(), again)
    assert again.runs == 1


async def test_older_epoch_is_refused_even_for_a_stored_result() -> None:
    operations = Operations()
    await operations.run(request(epoch=3), Work())
    with pytest.raises(errors.StaleEpoch) as caught:
        await operations.run(request(epoch=2), Work())
    assert caught.value.details == {"epoch": "2", "highest": "3"}
    assert operations.epoch == 3
    assert (await operations.run(request(epoch=4), Work())).directory == "result 1"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda o: o.id.ClearField("run"), r"operation\.id\.run"),
        (lambda o: o.id.ClearField("name"), r"operation\.id\.name"),
        (lambda o: setattr(o.id, "step", -1), r"operation\.id\.step=-1"),
        (lambda o: setattr(o, "epoch", -1), r"operation\.epoch=-1"),
    ],
)
async def test_incomplete_ids_are_refused(change: Any, named: str) -> None:
    made = request()
    change(made.operation)
    with pytest.raises(errors.InvalidArgument, match=named):
        await Operations().run(made, Work())


async def test_lane_serialises_in_order_and_other_lanes_go_on() -> None:
    operations, order = Operations(), []
    gate = asyncio.Event()

    async def blocking() -> Any:
        order.append("first")
        await gate.wait()
        return actor_pb2.ExportModelResponse()

    def named(name: str) -> Any:
        async def work() -> Any:
            order.append(name)
            return actor_pb2.ExportModelResponse()

        return work

    calls = [asyncio.create_task(operations.run(request(part="1"), blocking, lane="engine"))]
    calls += [
        asyncio.create_task(operations.run(request(part=p), named(p), lane="engine")) for p in ("second", "third")
    ]
    await asyncio.sleep(0.01)
    await operations.run(request(part="other"), named("other"), lane="io")
    await operations.run(request(part="free"), named("free"))
    assert order == ["first", "other", "free"]
    gate.set()
    await asyncio.gather(*calls)
    assert order[3:] == ["second", "third"]


async def test_a_full_lane_refuses_and_the_id_stays_free() -> None:
    operations, gate = Operations(max_queued=2), asyncio.Event()
    calls = [asyncio.create_task(operations.run(request(part=str(p)), Work(gate), lane="engine")) for p in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(errors.ResourceExhausted, match="2 operations wait for 'engine'"):
        await operations.run(request(part="late"), Work(gate), lane="engine")
    gate.set()
    await asyncio.gather(*calls)
    assert (await operations.run(request(part="late", payload="other"), Work(), lane="engine")).directory


async def test_waiting_work_is_given_up_when_a_newer_controller_speaks() -> None:
    operations, gate = Operations(), asyncio.Event()
    running = asyncio.create_task(operations.run(request(part="a"), Work(gate), lane="engine"))
    waiting, adopted, work = Work(), Work(), Work()
    doomed = asyncio.create_task(operations.run(request(part="b"), waiting, lane="engine"))
    kept = asyncio.create_task(operations.run(request(part="c"), adopted, lane="engine"))
    await asyncio.sleep(0.01)
    # The new controller asks for c again: that one is its own now.
    again = asyncio.create_task(operations.run(request(part="c", epoch=2), work, lane="engine"))
    await asyncio.sleep(0.01)
    gate.set()
    with pytest.raises(errors.Aborted, match="given up before it began"):
        await doomed
    assert (await running).directory == (await kept).directory == (await again).directory == "result 1"
    assert (waiting.runs, adopted.runs, work.runs) == (0, 1, 0)
    assert (await operations.run(request(part="b", epoch=2), waiting)).directory == "result 1"


async def test_late_calls_of_released_steps_are_refused() -> None:
    operations, work = Operations(), Work()
    for step in (1, 2, 3):
        await operations.run(request(step=step), work)
    operations.forget("r", 2)
    operations.forget("r", 1)
    for step in (1, 2):
        with pytest.raises(errors.FailedPrecondition, match="released"):
            await operations.run(request(step=step), work)
    assert (await operations.run(request(step=3), work)).directory == "result 3"
    # A later controller goes back to a checkpoint.
    assert (await operations.run(request(step=2, epoch=2), work)).directory == "result 4"


async def test_work_tried_again_that_waits_is_given_up_when_its_step_is_released() -> None:
    """Regression, found by the state machine: the failed attempt before it made it look begun."""
    operations, gate, work = Operations(), asyncio.Event(), Work(failure=errors.Unavailable("not now"))
    with pytest.raises(errors.Unavailable):
        await operations.run(request(step=1), work, lane="engine")
    running = asyncio.create_task(operations.run(request(step=2), Work(gate), lane="engine"))
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(operations.run(request(step=1), work, lane="engine"))
    await asyncio.sleep(0.01)
    operations.forget("r", 1)
    gate.set()
    with pytest.raises(errors.Aborted, match="given up before it began"):
        await waiting
    assert (await running).directory
    assert work.runs == 1


async def test_forgetting_running_work_lets_it_end_and_tells_where_its_results_go() -> None:
    operations, work, late = Operations(), Work(gate=asyncio.Event()), []
    operations.on_late_end = lambda run, step: late.append((run, step))
    attempt = asyncio.create_task(operations.run(request(), work))
    await work.begun.wait()
    operations.forget("r")
    assert len(operations.running()) == 1
    assert not late
    assert work.gate
    work.gate.set()
    assert (await attempt).directory == "result 1"
    assert late == [("r", 1)]
    with pytest.raises(errors.FailedPrecondition):
        await operations.run(request(), work)


async def test_last_applied_is_the_last_mutation() -> None:
    operations = Operations()
    assert operations.last_applied is None
    await operations.run(request("actor.update", step=4), Work(), mutates=True)
    await operations.run(request("actor.export", step=5), Work())
    with pytest.raises(errors.Internal):
        await operations.run(request("actor.update", step=6), Work(failure=errors.Internal("x")), mutates=True)
    assert operations.last_applied is not None
    assert (operations.last_applied.name, operations.last_applied.step) == ("actor.update", 4)


async def test_results_are_bounded() -> None:
    operations = Operations(max_kept=3)
    for part in "abc":
        await operations.run(request(part=part), Work())
    with pytest.raises(errors.ResourceExhausted, match="release"):
        await operations.run(request(part="d"), Work())
    operations.forget("r", 1)
    await operations.run(request(step=2), Work())


async def test_drain_waits_refuses_new_work_and_answers_whether_it_was_clean() -> None:
    operations, work = Operations(), Work(gate=asyncio.Event())
    attempt = asyncio.create_task(operations.run(request(), work))
    await work.begun.wait()
    draining = asyncio.create_task(operations.drain(5))
    await asyncio.sleep(0)
    with pytest.raises(errors.Unavailable, match="shutting down"):
        await operations.run(request(part="new"), Work())
    again = asyncio.create_task(operations.run(request(), work))
    await asyncio.sleep(0)
    assert work.gate
    work.gate.set()
    assert await draining
    assert (await attempt) is (await again)


async def test_drain_ends_work_that_takes_too_long() -> None:
    operations, work = Operations(), Work(gate=asyncio.Event())
    attempt = asyncio.create_task(operations.run(request(), work))
    await work.begun.wait()
    assert not await operations.drain(0.05)
    with pytest.raises(errors.Unavailable, match="shut down"):
        await attempt


async def test_exclusive_work_waits_for_the_lane_and_survives_its_caller() -> None:
    operations, gate, done = Operations(), asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(operations.run(request(), Work(gate), lane="engine"))
    await asyncio.sleep(0.01)

    async def release() -> None:
        done.set()

    caller = asyncio.create_task(operations.exclusively("engine", release))
    await asyncio.sleep(0.01)
    assert not done.is_set()
    caller.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await caller
    gate.set()
    await running
    await asyncio.wait_for(done.wait(), 1)


def test_digest_depends_on_type_and_payload_and_not_on_the_operation() -> None:
    assert payload_digest(request(step=1, epoch=1)) == payload_digest(request(step=2, epoch=9))
    assert payload_digest(request(payload="a")) != payload_digest(request(payload="b"))
    looked_at = actor_pb2.ActorServiceUpdateRequest(profile=common_pb2.Profiling(prefix="p"))
    assert payload_digest(looked_at) == payload_digest(actor_pb2.ActorServiceUpdateRequest())
    assert payload_digest(actor_pb2.ExportModelRequest(directory="d")) != payload_digest(
        role_pb2.SaveCheckpointRequest(directory="d")
    )
