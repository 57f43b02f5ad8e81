"""Operations under arbitrary duplicates, reorderings, stale epochs, failures, cancelled attempts and releases."""

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.gen.sextet.v1 import actor_pb2
from shared.rpc import errors
from shared.rpc.operations import Key, Operations

keys = st.builds(
    Key,
    st.just("r"),
    st.integers(0, 3),
    # The first two share a lane.
    st.sampled_from(["engine.a", "engine.b", "free"]),
    st.sampled_from(["", "2"]),
)


@dataclass
class Model:
    """What is known of one operation. State: waiting, running, done, failed (free to try again) or partly."""

    payload: str
    state: str
    epoch: int
    result: str = ""
    forgotten: bool = False


@dataclass
class Attempt:
    key: Key
    task: "asyncio.Task[Any]"
    checked: bool = False


class OperationsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.operations = Operations(max_queued=1000)
        self.model: dict[Key, Model] = {}
        self.gates: dict[Key, asyncio.Future[str]] = {}
        self.attempts: list[Attempt] = []
        self.epoch, self.floor = 0, (-1, -1)
        self.applied: dict[Key, int] = {}
        self.results = 0

    def settle(self) -> None:
        """Runs the loop until every task waits for a gate."""

        async def until_idle() -> None:
            await asyncio.sleep(0)
            while self.loop._ready:  # type: ignore[attr-defined] # noqa: ASYNC110 - no public way to ask
                await asyncio.sleep(0)

        self.loop.run_until_complete(until_idle())

    def work(self, key: Key) -> Any:
        async def work() -> Any:
            known = self.model[key]
            assert known.state == "waiting", "work began that was running or applied already"
            known.state = "running"
            gate = self.gates[key] = self.loop.create_future()
            try:
                outcome = await gate
            finally:
                del self.gates[key]
            if outcome == "ok":
                self.results += 1
                self.applied[key] = self.applied.get(key, 0) + 1
                known.state, known.result = "done", f"result {self.results}"
                self.after(key, known)
                return actor_pb2.ExportModelResponse(directory=known.result)
            known.state = "partly" if outcome == "partly" else "failed"
            self.after(key, known)
            raise (errors.PartlyApplied if outcome == "partly" else errors.Unavailable)(outcome)

        return work

    def after(self, key: Key, known: Model) -> None:
        if known.forgotten and self.model.get(key) is known:
            del self.model[key]
            self.applied.pop(key, None)

    @rule(key=keys, payload=st.sampled_from(["p", "p", "p", "q"]), age=st.sampled_from([0, 0, 0, 0, 1, -1]))
    def call(self, key: Key, payload: str, age: int) -> None:
        epoch = max(0, self.epoch + age)
        expected = self.expectation(key, payload, epoch)
        request = actor_pb2.ExportModelRequest(directory=payload)
        request.operation.id.CopyFrom(key.to_proto())
        request.operation.epoch = epoch
        lane = "engine" if key.name.startswith("engine") else None
        task = self.loop.create_task(self.operations.run(request, self.work(key), lane=lane))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.settle()
        if expected is None:
            self.attempts.append(Attempt(key, task))
        elif isinstance(expected, str):
            assert task.result().directory == expected
        else:
            assert type(task.exception()) is expected

    def expectation(self, key: Key, payload: str, epoch: int) -> Any:
        """An error class, a stored result, or None: the call waits for work."""
        if epoch < self.epoch:
            return errors.StaleEpoch
        self.epoch = epoch
        known = self.model.get(key)
        if known is None:
            if epoch <= self.floor[0] and key.step <= self.floor[1]:
                return errors.FailedPrecondition
            self.model[key] = Model(payload, "waiting", epoch)
            return None
        if known.payload != payload:
            return errors.PayloadMismatch
        known.epoch = max(known.epoch, epoch)
        if known.state == "partly":
            return errors.PartlyApplied
        if known.state == "done":
            return known.result
        if known.state == "failed":
            known.state = "waiting"
        return None

    @precondition(lambda self: self.gates)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "failed", "partly"]))
    def work_ends(self, data: st.DataObject, outcome: str) -> None:
        self.gates[data.draw(st.sampled_from(sorted(self.gates)))].set_result(outcome)
        self.settle()

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def attempt_is_cancelled(self, data: st.DataObject) -> None:
        before = set(self.gates)
        data.draw(st.sampled_from(self.attempts)).task.cancel()
        self.settle()
        assert set(self.gates) == before, "a caller stopped the work"

    @rule(step=st.integers(0, 3))
    def step_is_released(self, step: int) -> None:
        self.operations.forget("r", step)
        if self.floor[0] == self.epoch:
            step = max(step, self.floor[1])
        self.floor = (self.epoch, step)
        self.drop(lambda key: key.step <= step)

    @rule()
    def state_is_reset(self) -> None:
        self.operations.restart("r")
        self.floor = (-1, -1)
        self.drop(lambda key: key.step > 0)

    def drop(self, chosen: Any) -> None:
        for key in [key for key in self.model if chosen(key)]:
            if self.model[key].state == "running":
                self.model[key].forgotten = True
            else:
                del self.model[key]
                self.applied.pop(key, None)

    @invariant()
    def attempts_end_as_their_work_did(self) -> None:
        self.settle()
        for attempt in self.attempts:
            if not attempt.task.done() or attempt.checked or attempt.task.cancelled():
                continue
            attempt.checked = True
            error = attempt.task.exception()
            if isinstance(error, errors.Aborted):
                self.given_up(attempt.key)
            else:
                assert error is None or isinstance(error, errors.Unavailable | errors.PartlyApplied)
        self.attempts = [attempt for attempt in self.attempts if not attempt.task.done()]

    def given_up(self, key: Key) -> None:
        known = self.model.get(key)
        if known is not None and known.state == "waiting" and known.epoch < self.epoch:
            known.state = "failed"

    @invariant()
    def nothing_is_applied_twice(self) -> None:
        assert all(count == 1 for count in self.applied.values())

    @invariant()
    def one_engine_operation_at_a_time(self) -> None:
        assert sum(key.name.startswith("engine") for key in self.gates) <= 1

    @invariant()
    def running_is_what_runs(self) -> None:
        running = {Key(o.run, o.step, o.name, o.part) for o in self.operations.running()}
        assert set(self.gates) <= running

    def teardown(self) -> None:
        for _ in range(1000):
            if not self.gates:
                break
            for gate in list(self.gates.values()):
                gate.set_result("ok")
            self.settle()
        self.settle()
        assert all(attempt.task.done() for attempt in self.attempts), "an attempt hangs"
        assert self.operations.running() == []
        self.nothing_is_applied_twice()
        self.loop.close()


structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
TestOperations = OperationsMachine.TestCase
TestOperations.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
