"""Processes forked from one that has imported everything: what they are given, how their end is told."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.rpc.forkserver import Forked, ForkServer

MODULES = {
    "preloaded": "import time\nSECONDS = time.time()\n",
    "program": """
import os, sys, preloaded
if __name__ == "__main__":
    given = os.environ.get("GIVEN"), os.environ.get("SERVER")
    print(sys.argv[1:], *given, preloaded.SECONDS, os.getsid(0) == os.getpid())
    sys.exit(int(sys.argv[1]))
""",
    "waiting": "import time\nprint('here', flush=True)\ntime.sleep(60)\n",
    "tied": "from shared.rpc.lifetime import tie_to_parent\ntie_to_parent()\nimport waiting\n",
    "draws": "import random, uuid\nprint(random.random(), uuid.uuid4())\n",
}


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ForkServer]:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    forks = ForkServer(
        ["preloaded", "random", "not_installed"], tmp_path / "server.log", {"PYTHONPATH": path, "SERVER": "1"}
    )
    try:
        yield forks
    finally:
        await forks.close()


async def spawn(server: ForkServer, directory: Path, *command: str, name: str = "one") -> Forked:
    return await server.spawn(command, {"GIVEN": name}, directory / f"{name}.log", name)


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_it_runs(log: Path) -> None:
    await until(lambda: log.exists() and log.read_text())


async def test_a_process_gets_its_arguments_environment_and_log_and_no_import_again(
    server: ForkServer, tmp_path: Path
) -> None:
    started = [await spawn(server, tmp_path, "program", str(code), name=f"p-{code}") for code in (0, 7)]
    assert [await each.wait() for each in started] == [0, 7]
    assert [each.returncode for each in started] == [0, 7]
    first, second = ((tmp_path / f"p-{code}.log").read_text().split("]") for code in (0, 7))
    assert (first[0], second[0]) == ("['0'", "['7'")
    # Its own environment, not the server's; imported once, before both; in a session of its own.
    assert first[1].split() == ["p-0", "None", *second[1].split()[2:3], "True"]
    assert second[1].split()[0] == "p-7"


async def test_who_is_killed_is_told_and_the_others_live_on(server: ForkServer, tmp_path: Path) -> None:
    one, two = [await spawn(server, tmp_path, "waiting", name=name) for name in ("actor-0", "critic-0")]
    for name in ("actor-0", "critic-0"):
        await until_it_runs(tmp_path / f"{name}.log")
    assert psutil.Process(one.pid).name() == "actor-0"
    one.kill()
    assert await asyncio.wait_for(one.wait(), 60) == -signal.SIGKILL
    assert two.returncode is None
    assert psutil.pid_exists(two.pid)
    two.terminate()
    assert await asyncio.wait_for(two.wait(), 60) == -signal.SIGTERM


async def test_processes_do_not_draw_the_same_numbers(server: ForkServer, tmp_path: Path) -> None:
    started = [await spawn(server, tmp_path, "draws", name=f"d-{number}") for number in range(2)]
    assert [await each.wait() for each in started] == [0, 0]
    drawn = [(tmp_path / f"d-{number}.log").read_text().split() for number in range(2)]
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


async def test_a_server_that_dies_ends_its_processes_and_is_started_again(server: ForkServer, tmp_path: Path) -> None:
    orphan = await spawn(server, tmp_path, "tied", name="orphan")
    await until_it_runs(tmp_path / "orphan.log")
    assert server._server
    server._server.kill()
    assert await asyncio.wait_for(orphan.wait(), 60) == -signal.SIGTERM
    await until(lambda: not psutil.pid_exists(orphan.pid))
    again = await spawn(server, tmp_path, "program", "3")
    assert await again.wait() == 3


async def test_closing_leaves_nothing_behind(server: ForkServer, tmp_path: Path) -> None:
    await (await spawn(server, tmp_path, "program", "0")).wait()
    assert server._server
    pid = server._server.pid
    await server.close()
    await until(lambda: not psutil.pid_exists(pid))
