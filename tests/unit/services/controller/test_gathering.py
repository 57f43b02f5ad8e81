"""Replicas that take a version together: the controller names them once, and what fails so is fetched alone."""

from typing import Any

import pytest

from services.controller import detour
from services.controller.detour import Detour, after_failure
from shared.rpc.errors import FailedPrecondition
from shared.state.registry import list_replicas
from tests.unit.services.controller.conftest import ALL

TWO = (*ALL, "rollout-1")


def noting(asked: list[Any], refuse: bool = False) -> Any:
    async def hook(request: Any) -> None:
        asked.append((request.operation.id.step, request.gathering.id, tuple(request.gathering.members)))
        if refuse and request.gathering.members:
            raise FailedPrecondition("rollout-1 has shown no sign of life")

    return hook


def holding(fake: Any, held: list[str]) -> Any:
    async def hook(request: Any) -> None:
        held.append(fake.model)

    return hook


async def play(fakes: Any, controller: Any, offers: tuple[str, ...], refuse: bool = False) -> list[list[Any]]:
    await fakes.start(*TWO)
    fakes["actor-0"].offers = offers
    published: list[str] = []
    served: tuple[list[str], list[str]] = ([], [])
    fakes["actor-0"].hooks["after publish_weights"] = holding(fakes["actor-0"], published)
    asked: list[list[Any]] = [[], []]
    for number, notes in enumerate(asked):
        fake = fakes[f"rollout-{number}"]
        fake.hooks["prepare_weights"] = noting(notes, refuse and number == 0)
        fake.hooks["after commit_weights"] = holding(fake, served[number])
    await controller.create("r", rollout__replicas=2)
    record = await controller.over("r")
    assert (record.state, record.reason) == ("done", "")
    # Noted as it was served: at the end of a run its roles let go of what they hold, one before the other.
    assert served == (published, published)
    assert len(set(published)) == 3
    return asked


async def test_all_that_are_ready_are_named_anew_for_every_version(fakes: Any, controller: Any) -> None:
    first, second = await play(fakes, controller, ("gloo",))
    assert first == second
    assert [members for _, _, members in first] == [("rollout-0", "rollout-1")] * 3
    assert len({gathering for _, gathering, _ in first}) == 3


async def test_without_an_offer_each_fetches_alone(fakes: Any, controller: Any) -> None:
    first, second = await play(fakes, controller, ())
    assert {members for _, _, members in first + second} == {()}


async def test_what_fails_together_is_fetched_alone_in_the_same_step(
    fakes: Any, controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detour, "FIRST_SECONDS", 0.0)
    first, second = await play(fakes, controller, ("nccl",), refuse=True)
    assert [(step, bool(members)) for step, _, members in first] == [
        (step, together) for step in (1, 2, 3) for together in (True, False)
    ]
    assert all(members for _, _, members in second)


async def test_a_wire_that_failed_is_not_tried_again_at_once(fakes: Any, controller: Any) -> None:
    first, second = await play(fakes, controller, ("nccl",), refuse=True)
    assert [(step, members) for step, _, members in first] == [
        (1, ("rollout-0", "rollout-1")),
        (1, ()),
        (2, ()),
        (3, ()),
    ]
    assert [members for _, _, members in second] == [("rollout-0", "rollout-1"), ("rollout-1",), ("rollout-1",)]
    facts = {each.replica: controller.cluster.detour(each) for each in await list_replicas(controller.store)}
    assert "the wire failed (1 in a row; tried again in" in facts["rollout-0"]
    assert facts["rollout-0"].endswith("rollout-1 has shown no sign of life")
    assert facts["rollout-1"] == ""


def test_intervals_grow_and_another_actor_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detour.time, "monotonic", lambda: 100.0)
    known: Detour | None = None
    waits = []
    for _ in range(7):
        known = after_failure(known, "actor:1", "no sign of life")
        waits.append(known.until - 100)
    assert waits == [60, 120, 240, 480, 960, 1800, 1800]
    assert known is not None
    assert known.holds("actor:1")
    assert not known.holds("actor:2")
    assert after_failure(known, "actor:2", "it") == Detour("actor:2", "it", 1, 160.0)
