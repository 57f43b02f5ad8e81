"""Finding a user's function, recognising its signature, checking its answers."""

import asyncio
from fractions import Fraction

import numpy as np
import pytest
import torch

from services.reward.functions import RewardFunction, UnusableFunction, load_function, number, result
from tests.fakes.reward import GRADERS


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("tests.fakes.graders:ecko", "has no function 'ecko'; near names: echo"),
        (f"{GRADERS}:ecko", "has no function 'ecko'; near names: echo"),
        (f"{GRADERS.with_name('grader.py')}:echo", "near names: graders.py"),
        ("tests.fakes.nothing:echo", "ModuleNotFoundError: No module named 'tests.fakes.nothing'"),
        ("echo", "must be module:name or path/file.py:name"),
        (f"{GRADERS}:odd", "takes (something); it must take verl's"),
        (f"{GRADERS}:lacking", "also needs ['threshold']: set reward.kwargs.threshold"),
    ],
)
def test_an_unusable_function_is_named_with_what_to_change(runner, spec, says):
    with pytest.raises(UnusableFunction) as caught:
        RewardFunction(spec, {}, runner)
    assert f"reward.function={spec!r}" in str(caught.value)
    assert says in str(caught.value)


def test_an_import_that_raises_or_exits_is_a_message(runner, tmp_path):
    for text, says in [
        ("1/0", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def (", "SyntaxError"),
    ]:
        (tmp_path / "broken.py").write_text(text)
        with pytest.raises(UnusableFunction, match=says):
            load_function(f"{tmp_path}/broken.py:f")


def test_a_misspelt_kwarg_is_named_with_the_nearest(runner):
    with pytest.raises(UnusableFunction, match=r"reward.kwargs.bonsu: .* near names: bonus"):
        RewardFunction(f"{GRADERS}:asynchronous", {"bonsu": 1}, runner)


def test_a_file_finds_its_neighbours_but_hides_no_module(runner, tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 0.25")
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    (tmp_path / "mine.py").write_text("import json, neighbour\ndef f(solution_str): return neighbour.VALUE")
    function = RewardFunction(f"{tmp_path}/mine.py:f", {}, runner)
    assert function.grade([{"data_source": "", "response": "", "ground_truth": "", "extra_info": {}}]) == {
        "results": [{"score": 0.25, "parts": {}}]
    }


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(2), np.int64(3), np.array(1.5), torch.tensor(4.0)])
def test_numbers(value):
    assert number(value) == float(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1",
        [1.0],
        float("nan"),
        float("inf"),
        -float("inf"),
        10**400,
        1j,
        torch.ones(2),
        np.float32("nan"),
        Fraction(1),
    ],
)
def test_what_is_no_number(value):
    assert number(value) is None


def test_a_dict_gives_parts_and_drops_what_is_no_number():
    answer = result({"score": 1, "format": 0.5, "note": "text", "bad": float("nan"), "flag": False})
    assert answer == {"score": 1.0, "parts": {"format": 0.5, "flag": 0.0}}
    assert result({"reward": 1})["kind"] == "shape"
    assert result({"score": "1"})["kind"] == "score"
