"""The validator accepts what happened and catches every violation that is planted into it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from services.controller.prompts import DatasetOrder
from tests.chaos.histories import violations

ROWS, STEPS, BATCH = 5, 4, 2
ORDER = DatasetOrder(ROWS, 0, True)
History = tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]


def line(kind: str, epoch: int, step: int, **more: Any) -> dict[str, Any]:
    versions = {"actor": step, "critic": step}
    return {"kind": kind, "epoch": epoch, "step": step, "position": step * BATCH, "versions": versions, **more}


def applied(role: str, epoch: int, step: int, take: int, incarnation: str) -> dict[str, Any]:
    uids = [f"{step}:{ORDER.at(place)}:{k}" for k, place in enumerate(range((step - 1) * BATCH, step * BATCH))]
    return {
        "name": f"{role}.update", "epoch": epoch, "step": step, "part": str(take), "version": step, "prompts": uids,
        "incarnation": incarnation,
    }  # fmt: skip


def history() -> History:
    """Four steps. The actor dies in step 3, after its update and before the commit: back to step 1, where it saved."""
    journal = [line("begin", 1, 0)]
    roles: dict[str, list[dict[str, Any]]] = {"actor-0": [], "critic-0": []}

    def step(number: int, epoch: int, take: int, incarnation: str, commit: bool = True) -> None:
        for role in ("critic", "actor"):
            journal.append({"kind": "issue", "epoch": epoch, "name": f"{role}.update", "step": number})
            roles[f"{role}-0"].append(applied(role, epoch, number, take, incarnation))
        if commit:
            journal.append(line("commit", epoch, number))

    step(1, 1, 0, "a")
    step(2, 1, 0, "a")
    step(3, 1, 0, "a", commit=False)
    journal.append(line("rollback", 2, 2, take=1))
    journal.append(line("begin", 2, 1))
    for number in (2, 3, 4):
        step(number, 2, 1, "b")
    return journal, roles


def commits(journal: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in journal if each["kind"] == "commit"]


def lost(journal: Any, roles: Any) -> None:
    del roles["actor-0"][-1]


def doubled(journal: Any, roles: Any) -> None:
    roles["actor-0"].append(copy.deepcopy(roles["actor-0"][-1]))


def applied_by_two(journal: Any, roles: Any) -> None:
    roles["actor-1"] = [{**roles["actor-0"][-1], "incarnation": "c"}]


def applied_in_another_take(journal: Any, roles: Any) -> None:
    roles["critic-0"][-1]["part"] = "0"


def gap(journal: Any, roles: Any) -> None:
    journal.remove(commits(journal)[-2])


def committed_twice(journal: Any, roles: Any) -> None:
    journal.append(copy.deepcopy(journal[-1]))


def old_epoch(journal: Any, roles: Any) -> None:
    roles["actor-0"][-1]["epoch"] = 1


def back_without_rollback(journal: Any, roles: Any) -> None:
    journal[:] = [each for each in journal if each["kind"] != "rollback"]


def begins_ahead(journal: Any, roles: Any) -> None:
    journal.append(line("begin", 3, 6))


def take_skipped(journal: Any, roles: Any) -> None:
    next(each for each in journal if each["kind"] == "rollback")["take"] = 2


def other_version(journal: Any, roles: Any) -> None:
    roles["actor-0"][-1]["version"] = 5


def version_stands(journal: Any, roles: Any) -> None:
    commits(journal)[-1]["versions"] = {"actor": 3, "critic": 4}
    roles["actor-0"][-1]["version"] = 3


def version_moves_without_an_update(journal: Any, roles: Any) -> None:
    journal[:] = [each for each in journal if (each.get("name"), each["step"]) != ("critic.update", 4)]


def prompts_skipped(journal: Any, roles: Any) -> None:
    roles["actor-0"][-1]["prompts"].pop()


def prompts_of_the_step_before(journal: Any, roles: Any) -> None:
    roles["actor-0"][-1]["prompts"] = roles["actor-0"][-2]["prompts"]


def position_back(journal: Any, roles: Any) -> None:
    commits(journal)[-1]["position"] = 0


def issued_for_another_step(journal: Any, roles: Any) -> None:
    next(each for each in reversed(journal) if each["kind"] == "issue")["step"] = 6


PLANTED = [
    lost, doubled, applied_by_two, applied_in_another_take, gap, committed_twice, old_epoch, back_without_rollback,
    begins_ahead, take_skipped, other_version, version_stands, version_moves_without_an_update, prompts_skipped,
    prompts_of_the_step_before, position_back, issued_for_another_step,
]  # fmt: skip


def test_what_happened_is_accepted() -> None:
    assert violations(*history(), ORDER) == []


def test_a_late_line_of_a_deposed_controller_counts_for_nothing() -> None:
    journal, roles = history()
    journal.append(line("commit", 1, 9))
    assert violations(journal, roles, ORDER) == []


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_violation_is_found(plant: Callable[[Any, Any], None]) -> None:
    journal, roles = history()
    plant(journal, roles)
    assert violations(journal, roles, ORDER)
