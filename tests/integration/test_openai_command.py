"""`sextet openai` as users start it: a process of its own beside a real Redis, the token, and its end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.state import embedded
from tests.fakes.ports import kept_port

TOKEN = "token-of-the-tests-0123456789"


def start(directory: Path, port: int, **environ: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEXTET_")}
    return subprocess.Popen(
        [sys.executable, "-m", "sextet", "openai", "--port", str(port)],
        cwd=directory,
        env={**kept, "SEXTET_TOKEN": TOKEN, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def port() -> Iterator[int]:
    with kept_port() as port:
        yield port


def test_it_serves_until_it_is_told_to_stop(tmp_path: Path, port: int) -> None:
    server = embedded.start_redis(tmp_path / "redis")
    process = start(tmp_path, port, SEXTET_REDIS_URL=server.url)
    try:
        until, answer = time.monotonic() + 90, None
        while answer is None and time.monotonic() < until:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"authorization": f"Bearer {TOKEN}"})
            except httpx.ConnectError:
                time.sleep(0.1)
        assert answer is not None
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert "no rollout serves a policy now" in answer.json()["error"]["message"]
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        server.stop()


@pytest.mark.parametrize(
    ("environ", "code", "text"),
    [({}, 3, "no services run in this directory"), ({"SEXTET_REDIS_URL": "redis://127.0.0.1:9/0"}, 3, "127.0.0.1:9")],
)
async def test_what_keeps_it_from_starting_is_said(
    tmp_path: Path, environ: dict[str, str], code: int, text: str
) -> None:
    process = start(tmp_path, 0, **environ)
    _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == code
    assert text in said
    assert "Traceback" not in said
