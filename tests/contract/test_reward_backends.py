"""What every reward backend owes, whoever grades."""

import asyncio
import contextlib
import math

import pytest

from services.reward.backends import make_backend
from shared.rpc.errors import FailedPrecondition
from tests.fakes.grader_servers import grpc_grader, http_grader
from tests.fakes.reward import function_config, item, items, reward_config, write_tiny_reward_model

TEXTUAL = ["verl", "trl", "grpc", "http"]
ALL = [*TEXTUAL, "model"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return write_tiny_reward_model(tmp_path_factory.mktemp("reward-model"))


@pytest.fixture
async def backend(request, tiny_model):
    async with contextlib.AsyncExitStack() as stack:
        kind = request.param
        if kind in ("verl", "trl"):
            config = function_config("contract" if kind == "verl" else "contract_batch", workers=2, timeout=5.0)
        elif kind == "model":
            config = reward_config(backend="model", model={"path": str(tiny_model)})
        else:
            endpoint = await stack.enter_async_context(grpc_grader() if kind == "grpc" else http_grader())
            config = reward_config(backend=kind, endpoint=endpoint, workers=2, timeout=5.0)
        backend = make_backend(config, 4 << 30)
        stack.push_async_callback(backend.close)
        facts = await backend.open(config)
        assert all(isinstance(text, str) for pair in facts.items() for text in pair)
        yield backend


@pytest.mark.parametrize("backend", ALL, indirect=True)
@pytest.mark.parametrize("count", [0, 1, 2, 150])
async def test_one_grade_per_item(backend, count):
    grades = await backend.score("r", items(*(["a", "b", "ccc"] * 50)[:count]))
    assert len(grades) == count
    assert all(grade.valid and math.isfinite(grade.score) for grade in grades)


@pytest.mark.parametrize("backend", TEXTUAL, indirect=True)
async def test_grades_are_in_the_order_of_the_items(backend):
    truths = [str(index * index % 7) for index in range(150)]
    grades = await backend.score("r", [item("2", truth, sample=index) for index, truth in enumerate(truths)])
    assert [grade.score for grade in grades] == [float(truth == "2") for truth in truths]


@pytest.mark.parametrize("backend", TEXTUAL, indirect=True)
async def test_a_bad_item_costs_only_itself(backend):
    grades = await backend.score("r", items("a", "bad", *["a"] * 70, "bad", "a"))
    assert [index for index, grade in enumerate(grades) if not grade.valid] == [1, 72]
    assert all(grade.score == 1.0 for grade in grades if grade.valid)
    assert "no grade" in grades[1].error
    assert grades[1].kind in ("raised", "rejected")


@pytest.mark.parametrize("backend", ["verl", "grpc", "http"], indirect=True)
async def test_parts(backend):
    [grade] = await backend.score("r", items("abcd"))
    assert dict(grade.parts) == {"length": 4.0}


@pytest.mark.parametrize("backend", ALL, indirect=True)
async def test_calls_at_the_same_time_do_not_mix(backend):
    batches = [items(*[letter] * 10) for letter in "abc"]
    together = await asyncio.gather(*(backend.score("r", batch) for batch in batches))
    alone = [await backend.score("r", batch) for batch in batches]
    for mixed, single in zip(together, alone, strict=True):
        assert [grade.score for grade in mixed] == pytest.approx([grade.score for grade in single])


@pytest.mark.parametrize("backend", TEXTUAL, indirect=True)
@pytest.mark.parametrize("text", ["", "é🏳\u202e\x00\n", "x" * 1_000_000])
async def test_any_text_arrives(backend, text):
    right, wrong = await backend.score("r", [item(text, text), item(text, text + "!", sample=1)])
    assert (right.score, wrong.score) == (1.0, 0.0), (right.error, wrong.error)


@pytest.mark.parametrize("backend", ALL, indirect=True)
async def test_closed_twice_and_then_no_use(backend):
    await backend.close()
    await backend.close()
    with pytest.raises(FailedPrecondition):
        await backend.score("r", items("a"))
