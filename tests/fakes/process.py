"""A fake role as a real process, for tests that send signals; and what still lives of what a test has started."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from tests.fakes.role import TOKEN


@dataclass(frozen=True)
class RoleProcess:
    """A started `python -m tests.fakes.role`, serving."""

    process: "subprocess.Popen[str]"
    endpoint: str

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])


def alive_with(variable: str, value: str) -> list[str]:
    """Command lines of the processes of this machine that were started with that in their environment and still live.

    Tests run in several processes at once: a command alone does not tell whose it is.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            pass
    return found


def start_role(*flags: str, **environ: str) -> "subprocess.Popen[str]":
    """Starts one and does not wait; its log is on stderr."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.role", "--metrics-port", "-1", *flags],
        env={**os.environ, "SEXTET_TOKEN": TOKEN, "SEXTET_REDIS_URL": "memory://", **environ},
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def role_process(*flags: str, **environ: str) -> Iterator[RoleProcess]:
    """Starts one, waits until it serves, and kills it afterwards whatever happened."""
    process = start_role(*flags, **environ)
    try:
        yield RoleProcess(process, wait_until_serving(process))
    finally:
        process.kill()
        process.communicate(timeout=30)


def wait_until_serving(process: "subprocess.Popen[str]") -> str:
    """The endpoint from the "serving" line of the log."""
    assert process.stderr
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("{") and json.loads(line)["event"] == "serving":
            return json.loads(line)["endpoint"]
    raise RuntimeError("the role did not start: " + "".join(lines))
