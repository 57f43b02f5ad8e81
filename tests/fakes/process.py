"""A fake role as a real process, for tests that send signals."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.fakes.role import TOKEN


@dataclass(frozen=True)
class RoleProcess:
    """A started `python -m tests.fakes.role`, serving."""

    process: "subprocess.Popen[str]"
    endpoint: str

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])


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
