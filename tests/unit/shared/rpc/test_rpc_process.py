"""A role as a real process: signals, exit codes, and that nothing outlives its parent."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from shared.gen.sextet.v1 import role_pb2, role_pb2_grpc
from shared.rpc.client import Connections, call
from tests.fakes.process import role_process, start_role, wait_until_serving
from tests.fakes.role import CONFIG_JSON, TOKEN


def log_of(process: "subprocess.Popen[str]") -> list[dict]:
    assert process.stderr
    return [json.loads(line) for line in process.stderr if line.startswith("{")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_gracefully(number: int) -> None:
    with role_process() as role:
        role.process.send_signal(number)
        assert role.process.wait(30) == 0
        assert [event["event"] for event in log_of(role.process)] == ["draining", "stopped"]


async def test_running_work_is_finished_before_it_stops() -> None:
    with role_process("--configure-seconds", "3") as role:
        connections = Connections(TOKEN)
        stub = role_pb2_grpc.RoleServiceStub(connections.channel(role.endpoint))
        request = role_pb2.ConfigureRequest(config_json=CONFIG_JSON)
        request.operation.id.run, request.operation.id.name = "r", "configure"
        configuring = stub.Configure(request, timeout=60)
        while not (await call(stub.Describe, role_pb2.DescribeRequest(), timeout=5)).running:
            pass
        role.process.send_signal(signal.SIGTERM)
        assert (await configuring).facts == {"engine": "fake"}
        assert role.process.wait(30) == 0
        calls = [event for event in log_of(role.process) if event["event"] == "call"]
        assert [(c["run"], c["step"], c["operation"], c["outcome"]) for c in calls] == [("r", 0, "configure", "ok")]
        assert calls[0]["seconds"] > 1
        await connections.close()


async def test_a_second_signal_ends_it_at_once() -> None:
    with role_process("--configure-seconds", "100", "--drain-timeout", "100") as role:
        connections = Connections(TOKEN)
        stub = role_pb2_grpc.RoleServiceStub(connections.channel(role.endpoint))
        request = role_pb2.ConfigureRequest(config_json=CONFIG_JSON)
        request.operation.id.run, request.operation.id.name = "r", "configure"
        configuring = stub.Configure(request, timeout=100)
        while not (await call(stub.Describe, role_pb2.DescribeRequest(), timeout=5)).running:
            pass
        role.process.send_signal(signal.SIGTERM)
        assert role.process.stderr
        # Two that come at once are one.
        while '"draining"' not in role.process.stderr.readline():
            assert role.process.poll() is None
        role.process.send_signal(signal.SIGTERM)
        assert role.process.wait(60) == 128 + signal.SIGTERM
        configuring.cancel()
        await connections.close()


def test_a_port_in_use_exits_2_and_says_so_in_one_line() -> None:
    with role_process() as role:
        second = start_role("--bind", role.endpoint)
        _, shown = second.communicate(timeout=60)
        assert second.returncode == 2
        assert shown.strip().count("\n") == 0
        assert f"port {role.port} is in use" in shown
        assert "--bind" in shown


@pytest.mark.parametrize(
    ("flags", "environ", "code", "text"),
    [
        (["--bnd", "x"], {}, 2, "did you mean --bind?"),
        (["--bind", "0.0.0.0:0"], {"SEXTET_TOKEN": ""}, 2, "SEXTET_TOKEN"),
        (["--redis", "redis://127.0.0.1:9/0"], {}, 3, "redis://127.0.0.1:9/0"),
        (["--redis", "postgres://x"], {}, 2, "use redis://"),
    ],
)
def test_bad_starts_are_one_line_and_an_exit_code(flags: list[str], environ: dict, code: int, text: str) -> None:
    process = start_role(*flags, **environ)
    _, shown = process.communicate(timeout=30)
    assert (process.returncode, shown.strip().count("\n")) == (code, 0)
    assert text in shown


PARENT = """
import os, subprocess, sys, time
os.environ["SEXTET_PARENT_PID"] = str(os.getpid())
command = [sys.executable, "-m", "tests.fakes.role", "--metrics-port", "-1"]
child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
for line in child.stderr:
    if '"serving"' in line:
        break
print(child.pid, flush=True)
time.sleep(60)
"""


def test_it_does_not_outlive_a_killed_parent() -> None:
    environ = {**os.environ, "SEXTET_TOKEN": TOKEN, "SEXTET_REDIS_URL": "memory://"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environ)
    assert parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate(timeout=30)
    # Whoever adopts it may leave it a zombie: what counts is that it does nothing any more.
    until = time.monotonic() + 30
    while psutil.pid_exists(child.pid) and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the child lives on"
        time.sleep(0.05)


def test_it_does_not_start_without_its_parent() -> None:
    process = start_role(SEXTET_PARENT_PID="1")
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "SEXTET_PARENT_PID=1 is gone" in shown


def test_the_fixture_waits_for_serving() -> None:
    process = start_role("--bnd")
    with pytest.raises(RuntimeError, match="did you mean --bind"):
        wait_until_serving(process)
    process.communicate(timeout=30)
