"""Hostile responses through every shipped reward function and backend: nothing executes, and the next row is graded."""

import asyncio
import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.reward.backend import Grade, Item
from services.reward.backends import make_backend
from services.reward.backends.function import FunctionBackend
from tests.fakes.reward import function_config, item, reward_config, write_tiny_reward_model
from tests.security.hostile import MIB, responses

ROOT = Path(__file__).parents[2]
AUDITED = ROOT / "tests/fakes/audited.py"
REWARDS = ROOT / "examples/rewards"
MEMORY = 2 << 30
PARENT_GROWTH = 400 * MIB
RIGHT = "977"


@pytest.fixture
async def listener() -> AsyncIterator[tuple[int, list[Any]]]:
    """A port of this machine, and who connected to it."""
    callers: list[Any] = []
    server = await asyncio.start_server(lambda reader, writer: callers.append(writer), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], callers
    server.close()


def rows(texts: dict[str, str], **extra: Any) -> list[Item]:
    """Every text, and after each of them a right answer."""
    return [
        item(text, RIGHT, sample=2 * index + after, **extra)
        for index, hostile in enumerate(texts.values())
        for after, text in enumerate((hostile, RIGHT))
    ]


def check(texts: dict[str, str], grades: list[Grade], right: float | None = 1.0) -> None:
    """Hostile rows earn nothing or could not be graded; every right answer after one is graded right."""
    for index, name in enumerate(texts):
        hostile, after = grades[2 * index : 2 * index + 2]
        assert hostile.score == 0.0 or not hostile.valid or right is None, (name, hostile)
        assert after.valid, (name, after)
        assert math.isfinite(after.score) if right is None else after.score == right, (name, after)


@contextlib.contextmanager
def bounded(seconds: float) -> Any:
    """This process takes neither long nor much memory."""
    before, began = psutil.Process().memory_info().rss, time.monotonic()
    yield
    assert time.monotonic() - began < seconds
    assert psutil.Process().memory_info().rss - before < PARENT_GROWTH


def test_they_are_many_and_different(tmp_path: Path) -> None:
    texts = responses(tmp_path / "m", 1)
    assert len(set(texts.values())) == len(texts) >= 70
    assert max(map(len, texts.values())) >= 10_000_000


@pytest.mark.parametrize(
    "function",
    [
        f"{REWARDS}/functions.py:compute_score",
        f"{ROOT}/examples/demo/reward.py:compute_score",
        f"{REWARDS}/reasoning_gym_reward.py:compute_score",
        f"{REWARDS}/functions.py:answer_is_contained",
    ],
)
async def test_shipped_functions_execute_nothing(tmp_path: Path, listener: Any, function: str) -> None:
    if "reasoning" in function:
        pytest.importorskip("reasoning_gym")
    port, callers = listener
    marker, report = tmp_path / "executed", tmp_path / "report"
    texts = responses(marker, port)
    name = "watched_batch" if function.endswith("contained") else "watched"
    backend = FunctionBackend(MEMORY)
    config = reward_config(
        function=f"{AUDITED}:{name}", kwargs={"function": function, "report": str(report)}, timeout=10.0, workers=2
    )
    await backend.open(config)
    try:
        with bounded(100):
            grades = await backend.score("r", rows(texts, source_dataset="chain_sum"))
    finally:
        await backend.close()
    check(texts, grades)
    assert not report.exists(), report.read_text()
    assert not marker.exists()
    assert callers == []


async def test_the_watch_sees_what_a_foolish_function_does(tmp_path: Path) -> None:
    report = tmp_path / "report"
    backend = FunctionBackend(MEMORY)
    kwargs = {"function": f"{AUDITED}:foolish_verl", "report": str(report)}
    await backend.open(reward_config(function=f"{AUDITED}:watched", kwargs=kwargs, timeout=10.0))
    try:
        [grade, after] = await backend.score("r", [item("1 + 1", "2"), item("2", "2", sample=1)])
    finally:
        await backend.close()
    assert (grade.kind, after.kind) == ("raised", "raised")
    assert report.read_text().startswith("compile")


async def test_a_function_that_evaluates_responses_is_bounded_and_the_next_row_is_graded() -> None:
    """No sandbox, but limits: time, memory and descriptors end what a response blows up."""
    texts = {
        "power": "9**9**9**9", "list": "[0] * 10**11", "text": "'a' * 10**12", "brackets": "(" * 100_000,
        "loop": "sum(1 for _ in iter(int, 1))", "exit": "exit()", "abort": "__import__('os').abort()",
        "descriptors": "[open('/dev/null') for _ in range(10**6)]", "recursion": "(f := lambda: f())()",
        "stop": "__import__('os').kill(__import__('os').getpid(), 19)",
    }  # fmt: skip
    backend = FunctionBackend(1 << 30)
    await backend.open(reward_config(function=f"{AUDITED}:foolish", timeout=3.0, workers=2))
    try:
        with bounded(100):
            grades = await backend.score("r", rows(texts))
    finally:
        await backend.close()
    check(texts, grades)
    kinds = dict(zip(texts, (grade.kind for grade in grades[::2]), strict=True))
    assert kinds == {
        "power": "timeout", "list": "raised", "text": "raised", "brackets": "raised", "loop": "timeout",
        "exit": "raised", "abort": "exited", "descriptors": "raised", "recursion": "raised", "stop": "timeout",
    }  # fmt: skip


async def test_a_grader_has_no_new_privileges_and_limits_that_it_cannot_raise() -> None:
    backend = FunctionBackend(MEMORY)
    await backend.open(function_config("limits", timeout=5.0))
    try:
        [grade] = await backend.score("r", [item("a")])
    finally:
        await backend.close()
    parts = dict(grade.parts)
    assert parts["no_new_privileges"] == 1
    assert (parts["AS"], parts["AS_hard"]) == (MEMORY, MEMORY)
    assert (parts["CORE_hard"], parts["NOFILE"], parts["NOFILE_hard"]) == (0, 1024, 1024)


@contextlib.asynccontextmanager
async def example_server(kind: str) -> AsyncIterator[str]:
    script, argument = {"grpc": ("python_server.py", "127.0.0.1:0"), "http": ("http_server.py", "0")}[kind]
    process = await asyncio.create_subprocess_exec(sys.executable, REWARDS / script, argument, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        port = int((await process.stdout.readline()).split()[-1])
        yield f"127.0.0.1:{port}" if kind == "grpc" else f"http://127.0.0.1:{port}/score"
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_shipped_servers_execute_nothing(tmp_path: Path, listener: Any, kind: str) -> None:
    port, callers = listener
    marker = tmp_path / "executed"
    # What crosses a wire as UTF-8 has lost its surrogates long before: blocks hold none.
    texts = {name: text for name, text in responses(marker, port).items() if name != "surrogates"}
    async with example_server(kind) as endpoint:
        config = reward_config(backend=kind, endpoint=endpoint, timeout=10.0, workers=2)
        backend = make_backend(config, MEMORY)
        await backend.open(config)
        try:
            with bounded(100):
                grades = await backend.score("r", rows(texts))
        finally:
            await backend.close()
    check(texts, grades)
    assert not marker.exists()
    assert callers == []


async def test_a_reward_model_executes_nothing(tmp_path: Path, listener: Any) -> None:
    port, callers = listener
    marker = tmp_path / "executed"
    texts = responses(marker, port)
    directory = write_tiny_reward_model(tmp_path / "model")
    config = reward_config(backend="model", model={"path": str(directory)})
    backend = make_backend(config, MEMORY)
    await backend.open(config)
    try:
        with bounded(100):
            grades = await backend.score("r", rows(texts))
    finally:
        await backend.close()
    check(texts, grades, right=None)
    assert grades[2 * list(texts).index("ten megabytes")].kind == "too_long"
    assert not marker.exists()
    assert callers == []


DEEP = "[" * 900 + "]" * 900
ODD_PROMPTS = [
    "[" * 100_000, DEEP, '{"a":' * 100_000, "9" * 10_000, "5", "null", "true", '"text"', "{}", "[1, 2]",
    '[{"role": 1}]',
    '[{"role": "user", "content": null}]', '[{"role": "user"}]', "[[]]", "NaN", "1e999", "\x00", "",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["function", "trl", "http", "model"])
async def test_odd_prompts_and_extra_info_cost_only_their_row(tmp_path: Path, kind: str) -> None:
    """They come from a data file, which is read as it is."""
    async with contextlib.AsyncExitStack() as stack:
        if kind == "http":
            config = reward_config(backend="http", endpoint=await stack.enter_async_context(example_server("http")))
        elif kind == "model":
            config = reward_config(backend="model", model={"path": str(write_tiny_reward_model(tmp_path / "m"))})
        else:
            name = "compute_score" if kind == "function" else "answer_is_contained"
            config = reward_config(function=f"{REWARDS}/functions.py:{name}", timeout=10.0)
        backend = make_backend(config, MEMORY)
        await backend.open(config)
        stack.push_async_callback(backend.close)
        asked = []
        for index, text in enumerate(ODD_PROMPTS):
            asked += [
                Item("u", 3 * index, "d", text, RIGHT, RIGHT, "{}"),
                Item("u", 3 * index + 1, "d", "[]", RIGHT, RIGHT, text),
            ]
            asked += [item(RIGHT, RIGHT, sample=3 * index + 2)]
        grades = await backend.score("r", asked)
    for index, grade in enumerate(grades):
        assert grade.valid or index % 3 != 2, (ODD_PROMPTS[index // 3][:40], grade)
    assert sum(grade.valid for grade in grades) > len(ODD_PROMPTS) * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_no_reasoning_gym_scorer_executes_a_response(tmp_path: Path, listener: Any) -> None:
    """All tasks that are not refused, with real entries, under the watch."""
    gym = pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    port, callers = listener
    marker, report, entries = tmp_path / "executed", tmp_path / "report", tmp_path / "entries.json"
    found: dict[str, Any] = {}
    # These evaluate what the data file says, its ground truth or its problem, and not the response.
    for task in sorted(set(DATASETS) - {"bitwise_arithmetic", "number_sorting"}):
        with contextlib.suppress(Exception):
            entry = gym.create_dataset(task, size=1, seed=1)[0]
            found[task] = json.loads(
                json.dumps({"answer": str(entry["answer"]), "metadata": entry["metadata"]}, default=str)
            )
    assert len(found) > 80
    entries.write_text(json.dumps(found))
    texts = {name: text for name, text in responses(marker, port).items() if len(text) < MIB}
    grader = f"{REWARDS}/reasoning_gym_reward.py:compute_score"
    kwargs = {"entries": str(entries), "grader": grader, "report": str(report)}
    backend = FunctionBackend(MEMORY)
    await backend.open(reward_config(function=f"{AUDITED}:every_task", kwargs=kwargs, timeout=30.0, workers=2))
    try:
        grades = await backend.score("r", [item(text, "1", sample=index) for index, text in enumerate(texts.values())])
    finally:
        await backend.close()
    assert not report.exists(), report.read_text()
    for name, grade in zip(texts, grades, strict=True):
        # A hundred scorers in one call: some take their time over 1E+999999999999999999, and are ended.
        assert grade.valid or grade.kind == "timeout", (name, grade)
    assert min(grade.parts["graded"] for grade in grades if grade.valid) > 40
    assert sum(grade.valid for grade in grades) > len(grades) - 5
    assert not marker.exists()
    assert callers == []
