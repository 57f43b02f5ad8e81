"""User code in killable processes: what misbehaves costs its sample, and nothing stays behind."""

import asyncio
import contextlib
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from services.reward.backends.function import FunctionBackend
from shared.rpc.errors import FailedPrecondition
from tests.fakes.process import alive_with
from tests.fakes.reward import GRADERS, function_config, item, items, reward_config

BAD = {
    "nan": "score", "inf": "score", "none": "score", "text": "score", "list": "score", "huge": "score",
    "beyond_float32": "score", "dict": "shape", "none_in_dict": "score", "raise": "raised", "sys_exit": "raised",
    "exit": "exited", "segfault": "exited", "hang": "timeout", "spin": "timeout", "orphan_hang": "timeout",
    "escape_and_die": "exited", "memory": "raised", "recurse": "raised",
}  # fmt: skip
GOOD = {"fine": 1.0, "numpy": 0.5, "bool": 1.0, "print": 1.0, "stdin": 0.0, "fork": 1.0}


@contextlib.asynccontextmanager
async def opened(name: str, memory_bytes: int = 2 << 30, **reward: Any) -> AsyncIterator[FunctionBackend]:
    backend = FunctionBackend(memory_bytes)
    await backend.open(function_config(name, **reward))
    try:
        yield backend
    finally:
        await backend.close()


@pytest.mark.parametrize("name", ["misbehave", "misbehave_in_batches"])
async def test_misbehaviour_costs_its_sample_only(name):
    responses = [text for pair in zip(BAD, [*GOOD] * 4, strict=False) for text in pair]
    async with opened(name, workers=4, timeout=2.0) as backend:
        grades = await backend.score("r", items(*responses))
    for response, grade in zip(responses, grades, strict=True):
        assert grade.kind == BAD.get(response, ""), (response, grade)
        assert grade.valid is (response in GOOD)
        assert math.isnan(grade.score) if response in BAD else grade.score == GOOD[response]
        assert bool(grade.error) is (response in BAD)
    assert "RuntimeError: no grade for you" in grades[responses.index("raise")].error
    assert "exit code 7" in grades[responses.index("exit")].error
    assert "SIGSEGV" in grades[responses.index("segfault")].error
    assert "reward.timeout=2 s" in grades[responses.index("hang")].error
    assert "MemoryError" in grades[responses.index("memory")].error


async def test_nothing_is_left_after_close(monkeypatch):
    mark = secrets.token_hex(8)
    monkeypatch.setenv("TEST_MARK", mark)
    async with opened("misbehave", workers=2, timeout=0.5) as backend:
        assert alive_with("TEST_MARK", mark)
        await backend.score("r", items("fork", "orphan_hang", "fine", "hang"))
    await _eventually(lambda: not alive_with("TEST_MARK", mark))


async def test_a_dead_grader_is_replaced():
    async with opened("process_id") as backend:
        first, dead, second, third = await backend.score("r", items("a", "die", "b", "c"))
    assert not dead.valid
    assert first.score != second.score == third.score


async def test_graders_share_the_work():
    async with opened("process_id", workers=3) as backend:
        grades = await backend.score("r", items(*"abcdefghijklmnop"))
    assert len({grade.score for grade in grades}) > 1


async def test_parts_and_async_and_kwargs():
    async with opened("echo") as backend:
        [grade] = await backend.score("r", [item("abc", "abc")])
        assert (grade.score, dict(grade.parts)) == (1.0, {"length": 3.0})
    async with opened("asynchronous", kwargs={"bonus": 0.5}) as backend:
        right, wrong = await backend.score("r", [item("a", "a"), item("b", "a")])
        assert (right.score, wrong.score) == (1.5, 0.5)


async def test_trl_columns_follow_the_prompts_form():
    async with opened("columns_seen") as backend:
        chat = [item("a", level=index, other="x") for index in range(3)]
        text = [item("a", prompt='"what"', level=index, other="x") for index in range(3)]
        for batch in (chat, text):
            assert [grade.score for grade in await backend.score("r", batch)] == [0.0, 1.0, 2.0]


async def test_too_few_results_cost_the_row_that_caused_it():
    async with opened("too_few") as backend:
        grades = await backend.score("r", items("a", "drop", "b"))
    assert [grade.kind for grade in grades] == ["", "shape", ""]
    assert grades[1].error == "0 scores for 1 completions"


async def test_an_unusable_function_fails_open_and_leaves_no_process():
    backend = FunctionBackend(0)
    with pytest.raises(FailedPrecondition, match="near names: echo") as caught:
        await backend.open(function_config("ecko", workers=2))
    assert caught.value.details["key"] == "reward.function"
    assert not [p for p in psutil.Process().children(recursive=True) if "services.reward.grader" in str(p.cmdline())]


async def test_an_import_that_hangs_or_dies_is_a_message(tmp_path, monkeypatch):
    for text, seconds, says in [
        ("import time; time.sleep(60)", 1.0, "import takes more than 1 s"),
        ("import os; os._exit(5)", 60.0, "exit code 5"),
    ]:
        monkeypatch.setattr("services.reward.child.START_SECONDS", seconds)
        (tmp_path / "broken.py").write_text(text)
        with pytest.raises(FailedPrecondition, match=says):
            await FunctionBackend(0).open(reward_config(function=f"{tmp_path}/broken.py:f"))


async def test_a_cancelled_call_does_not_answer_the_next_one():
    async with opened("misbehave", timeout=20.0) as backend:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await backend.score("r", items("hang"))
        [grade] = await backend.score("r", items("fine"))
    assert grade.score == 1.0


async def test_user_code_sees_no_secrets(monkeypatch):
    monkeypatch.setenv("SEXTET_TOKEN", "hush")
    async with opened("secrets") as backend:
        [grade] = await backend.score("r", items("a"))
    assert grade.score == 0.0


async def test_graders_die_with_the_service_even_while_user_code_holds_the_interpreter(tmp_path):
    noted = tmp_path / "ids"
    script = f"""
import asyncio
from services.reward.backends.function import FunctionBackend
from tests.fakes.reward import function_config, items
async def main():
    backend = FunctionBackend(0)
    await backend.open(function_config("leave_a_child", timeout=60, kwargs={{"path": {str(noted)!r}}}))
    await backend.score("r", items("a"))
asyncio.run(main())
"""
    root = GRADERS.parents[2]
    service = subprocess.Popen([sys.executable, "-c", script], cwd=root)  # noqa: ASYNC220 - the test waits for it
    try:
        ids = await _eventually(lambda: noted.exists() and [int(word) for word in noted.read_text().split()])
        assert all(psutil.pid_exists(number) for number in ids)
    finally:
        service.kill()
        service.wait()
    await _eventually(lambda: not any(map(_alive, ids)))


def _alive(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _eventually(condition: Any, seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "did not happen in time"
        await asyncio.sleep(0.05)
    return found


async def test_graders_are_limited_in_memory_and_processor_time():
    async with opened("limits", memory_bytes=3 << 30, timeout=10.0) as backend:
        [grade] = await backend.score("r", items("a"))
    assert (grade.parts["AS"], grade.parts["CORE"]) == (3 << 30, 0)
    assert 10 <= grade.parts["CPU"] <= 10 * (os.cpu_count() or 1) + 4


async def test_a_grader_runs_alone_in_its_group_and_session():
    async with opened("process_id") as backend:
        [grade] = await backend.score("r", items("a"))
        number = int(grade.score)
        assert os.getpgid(number) == os.getsid(number) == number != os.getpgid(0)
