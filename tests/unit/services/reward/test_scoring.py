"""Grades to columns and numbers."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.backend import FLOAT32_MAX, Item, failed, finite, valid_grade
from services.reward.scoring import block_of, items_of, metrics_of
from shared.batch.block import Block, Ragged, RowKey
from tests.fakes.reward import item, items

ROWS = (RowKey("1:0:0", 0), RowKey("1:0:0", 1), RowKey("1:1:0", 0))


def test_rows_become_items():
    texts = {
        "data_source": "d",
        "prompt_json": '"p"',
        "response": "é\x00",
        "ground_truth": "g",
        "extra_info": '{"a": 1}',
    }
    block = Block(ROWS, {name: Ragged.from_text([text] * 3) for name, text in texts.items()})
    assert [(one.uid, one.sample) for one in items_of(block)] == [tuple(row) for row in ROWS]
    first = items_of(block)[0]
    assert (first.prompt, first.response, first.extra_info) == ("p", "é\x00", {"a": 1})


def test_json_that_is_none_is_text_or_an_empty_dict():
    assert item("a", prompt="not json").prompt == "not json"
    assert item("a", prompt='"text"').prompt == "text"
    assert Item("u", 0, "d", "", "r", "g", "").extra_info == {}


def test_an_invalid_grade_has_no_score_and_is_never_counted():
    grades = [valid_grade(1.0, {"format": 0.5}), failed("timeout", "late"), valid_grade(0.0)]
    block = block_of(ROWS, grades)
    assert block["valid"].scalars().tolist() == [1, 0, 1]
    assert block["score"].scalars()[[0, 2]].tolist() == [1.0, 0.0]
    assert math.isnan(block["score"].scalars()[1])
    assert [block["score/format"].scalars()[0], *map(math.isnan, block["score/format"].scalars()[1:])] == [
        0.5,
        True,
        True,
    ]
    numbers = metrics_of(items("a", "b", "c"), grades, 2.0)
    assert numbers == {
        "count": 2, "invalid": 1, "invalid_share": 1 / 3, "seconds": 2.0, "mean": 0.5, "std": 0.5, "min": 0.0,
        "max": 1.0, "timeout_errors": 1, "score/format": 0.5, "source/d": 0.5,
    }  # fmt: skip


def test_names_are_bounded():
    asked = [item("a", source=f"s{index}" * 100, sample=index) for index in range(20)]
    grades = [valid_grade(1.0, {f"part{index}": 1.0}) for index in range(20)]
    numbers = metrics_of(asked, grades, 0.0)
    assert sum(name.startswith("source/") for name in numbers) == 8
    assert sum(name.startswith("score/") for name in numbers) == 16
    assert all(len(name) < 80 for name in numbers)
    rows = [RowKey("u", index) for index in range(20)]
    assert len(block_of(rows, grades).columns) == 18
    assert not valid_grade(1.0, {"a/b": 1.0, "": 1.0, "x" * 65: 1.0, "a b": 1.0, 3: 1.0, "nan": float("nan")}).parts


@pytest.mark.parametrize("value", [None, "1", [1.0], {}, math.nan, math.inf, -math.inf, 10**400, FLOAT32_MAX * 1.01])
def test_what_is_no_finite_float32_is_invalid(value):
    grade = valid_grade(value)
    assert (grade.valid, grade.kind) == (False, "score")
    assert math.isnan(grade.score)


@given(st.lists(st.one_of(st.floats(width=32), st.integers(), st.none()), min_size=1, max_size=20))
def test_numbers_are_finite_and_over_the_valid_grades(scores):
    asked = items(*map(str, scores))
    grades = [valid_grade(score) for score in scores]
    numbers = metrics_of(asked, grades, 0.0)
    kept = [float(score) for score in scores if finite(score) is not None]
    assert numbers["count"] == len(kept)
    assert numbers["count"] + numbers["invalid"] == len(scores)
    assert all(math.isfinite(value) for value in numbers.values())
    if kept:
        assert numbers["mean"] == pytest.approx(statistics.fmean(kept))
        assert numbers["std"] == pytest.approx(statistics.pstdev(kept), rel=1e-6, abs=1e-9)
    else:
        assert "mean" not in numbers


def test_errors_are_shortened():
    assert len(failed("raised", "x" * 10_000).error) == 500
