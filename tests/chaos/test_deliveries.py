"""Calls as networks deliver them: lost replies, repeats, other orders, old epochs, too many. Each is done once."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from shared.gen.sextet.v1 import actor_pb2, common_pb2, role_pb2
from shared.rpc import errors
from shared.rpc.client import call
from shared.rpc.operations import Operations
from shared.rpc.role import SavedCheckpoint
from shared.rpc.run import RoleContext, RoleParts
from tests.fakes.role import FakeBackend, RunningRole, fake_role

pytestmark = pytest.mark.chaos
REPLIES, DELIVERIES = 200, 1000


class FakeCounter(FakeBackend):
    """Counts what is applied."""

    applied: list[str]
    seconds_each = 0.0

    async def stage(self) -> Any:
        return SimpleNamespace(version=0, save=self.save)

    async def save(self, directory: Path) -> SavedCheckpoint:
        self.applied.append(str(directory))
        await asyncio.sleep(self.seconds_each)
        return SavedCheckpoint("d", len(self.applied), 0)


def build(context: RoleContext[Any]) -> RoleParts:
    backend = FakeCounter()
    backend.applied = []
    return RoleParts(backend, [], [])


def change(number: int) -> role_pb2.SaveCheckpointRequest:
    request = role_pb2.SaveCheckpointRequest(directory=f"d{number}")
    request.operation.epoch = 1
    request.operation.id.CopyFrom(common_pb2.OperationId(run="r", step=number, name="actor.checkpoint", part="0"))
    return request


async def stage(role: RunningRole) -> None:
    """`change` is the writing of a copy, which has to be there."""
    request = role_pb2.StageCheckpointRequest()
    request.operation.epoch = 1
    request.operation.id.CopyFrom(common_pb2.OperationId(run="r", name="actor.stage", part="0"))
    await call(role.role.StageCheckpoint, request, timeout=60)


async def lose_the_reply(role: RunningRole, number: int) -> None:
    with pytest.raises(errors.DeadlineExceeded):
        await call(role.role.SaveCheckpoint, change(number), timeout=0.5)


async def test_replies_are_lost_after_the_work_was_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_role(build) as role:
        await stage(role)
        for first in range(0, REPLIES, 50):
            numbers = range(first, first + 50)
            # The result is stored, and the caller is gone before it is sent.
            monkeypatch.setenv("SEXTET_FAILPOINTS", "actor.checkpoint.done=sleep:1")
            await asyncio.gather(*(lose_the_reply(role, number) for number in numbers))
            monkeypatch.delenv("SEXTET_FAILPOINTS")
            answers = await asyncio.gather(
                *(call(role.role.SaveCheckpoint, change(number), timeout=60) for number in numbers)
            )
            assert sorted(answer.bytes for answer in answers) == list(range(first + 1, first + 51))
        backend: Any = role.parts.backend
        assert sorted(backend.applied) == sorted(f"d{number}" for number in range(REPLIES))


async def test_repeats_other_orders_and_old_epochs() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    choose, operations = random.Random(seed), Operations()
    applied: list[tuple[int, str]] = []
    epoch, bound, wrongly = 5, dict[int, str](), []
    operations.observe_epoch(epoch)  # else a delivery of epoch 4 that came first would be none of an old one

    async def deliver(step: int, payload: str, age: int) -> None:
        nonlocal epoch
        at = epoch + age
        request = actor_pb2.ExportModelRequest(directory=payload)
        request.operation.id.CopyFrom(common_pb2.OperationId(run="r", step=step, name="actor.update", part="0"))
        request.operation.epoch = at

        async def work() -> actor_pb2.ExportModelResponse:
            await asyncio.sleep(0)
            applied.append((step, payload))
            return actor_pb2.ExportModelResponse(directory=f"{step}{payload}")

        stale, other = at < epoch, bound.get(step, payload) != payload
        epoch = max(epoch, at)
        if not stale:
            bound.setdefault(step, payload)
        try:
            answer = await operations.run(request, work, lane="engine", mutates=True)
        except (errors.StaleEpoch, errors.PayloadMismatch, errors.Aborted):
            return
        if stale or other or answer.directory != f"{step}{payload}":
            wrongly.append((step, payload, age))

    deliveries = [(choose.randrange(50), choose.choice("pppq"), choose.choice([0] * 8 + [-1, -3])) for _ in range(980)]
    deliveries += [(choose.randrange(50), "p", 1) for _ in range(DELIVERIES - len(deliveries))]
    choose.shuffle(deliveries)
    for first in range(0, DELIVERIES, 20):
        await asyncio.gather(*(deliver(*delivery) for delivery in deliveries[first : first + 20]))
    assert wrongly == []
    assert len(applied) == len({step for step, _ in applied}), "a step was applied twice"
    assert all(bound[step] == payload for step, payload in applied)


@pytest.mark.slow
async def test_overload_is_refused_with_bounded_memory() -> None:
    """1,000 calls at once: what does not fit is RESOURCE_EXHAUSTED, and done when it is asked for again."""
    async with fake_role(build) as role:
        backend: Any = role.parts.backend
        backend.seconds_each = 0.01
        process, refused = psutil.Process(), 0
        await stage(role)
        await call(role.role.SaveCheckpoint, change(0), timeout=60)
        before = process.memory_info().rss

        async def ask(number: int) -> None:
            nonlocal refused
            while True:
                try:
                    await call(role.role.SaveCheckpoint, change(number), timeout=60)
                    return
                except errors.ResourceExhausted:
                    refused += 1
                    await asyncio.sleep(0.5)

        await asyncio.gather(*(ask(number) for number in range(1, 1001)))
        assert refused > 500
        assert sorted(backend.applied) == sorted(f"d{number}" for number in range(1001))
        assert process.memory_info().rss - before < 64 << 20
