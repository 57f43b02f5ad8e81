"""The clients against a gRPC server that speaks controller.proto: reconnecting, cancelling, errors, the endpoint."""

import asyncio
import json
import os
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from sextet.client import AsyncClient, Client
from sextet.endpoint import LocalState, find_controller, made_at, read_state, write_state
from sextet.lastwords import last_words
from shared.config import ConfigError
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.gen.sextet.v1 import controller_pb2_grpc
from shared.rpc.errors import NotFound, Unauthenticated, Unavailable
from shared.rpc.interceptors import Guard

TOKEN = "a-token-for-these-tests"


class FakeController(controller_pb2_grpc.ControllerServiceServicer):
    """Runs are names; the first stream of events breaks off in the middle."""

    def __init__(self) -> None:
        self.created: list[pb.CreateRunRequest] = []
        self.after: list[str] = []
        self.cancelled = 0

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.CreateRunResponse:
        self.created.append(request)
        return pb.CreateRunResponse(run=pb.Run(id=request.id, config_json=request.config_json))

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        raise NotFound(f"there is no run {request.id!r}")

    async def ProfileRun(self, request: pb.ProfileRunRequest, context: Any) -> pb.ProfileRunResponse:
        return pb.ProfileRunResponse(calls=[pb.CallProfile(step=request.steps, call=f"{request.role}.update")])

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        self.after.append(request.after)
        if request.id == "endless":
            try:
                yield pb.WatchRunResponse(event=pb.RunEvent(cursor="1"))
                await asyncio.sleep(3600)
            finally:
                self.cancelled += 1
        for number in range(int(request.after or 0) + 1, 5):
            yield pb.WatchRunResponse(event=pb.RunEvent(cursor=str(number), kind="step", step=number))
            if number == 2 and len(self.after) == 1:
                raise Unavailable("the controller is going away")


@pytest.fixture
def controller() -> Iterator[tuple[FakeController, str]]:
    """A server in a thread and event loop of its own, and its endpoint."""
    loop, fake, ready, endpoint = asyncio.new_event_loop(), FakeController(), threading.Event(), ""

    async def serve() -> grpc.aio.Server:
        nonlocal endpoint
        server = grpc.aio.server(interceptors=[Guard(TOKEN)])
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(fake, server)
        endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        ready.set()
        return server

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(serve(), loop).result(10)
    assert ready.is_set()
    yield fake, endpoint
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


CONFIG = {
    "total_steps": 1,
    "model": {"path": "m"},
    "data": {"path": "d"},
    "reward": {"function": "f:g"},
}


def test_watch_goes_on_where_it_was(controller: tuple[FakeController, str]) -> None:
    fake, endpoint = controller
    with Client(endpoint, TOKEN) as client:
        assert [event.step for event in client.watch("r")] == [1, 2, 3, 4]
    assert fake.after == ["", "2"]


def test_leaving_a_watch_ends_its_stream(controller: tuple[FakeController, str]) -> None:
    fake, endpoint = controller
    with Client(endpoint, TOKEN) as client:
        for _ in client.watch("endless"):
            break
    until = time.monotonic() + 10
    while not fake.cancelled:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_create_fills_defaults_and_makes_an_id(controller: tuple[FakeController, str]) -> None:
    fake, endpoint = controller
    with Client(endpoint, TOKEN) as client:
        run = client.create_run(CONFIG, ["seed=7"])
        with pytest.raises(ConfigError, match="unknown key 'nix'"):
            client.create_run({**CONFIG, "nix": 1})
    assert run.id
    assert json.loads(fake.created[0].config_json)["seed"] == 7
    assert len(fake.created) == 1


def test_errors_keep_their_class(controller: tuple[FakeController, str]) -> None:
    _, endpoint = controller
    with Client(endpoint, TOKEN) as client, pytest.raises(NotFound, match="no run 'x'"):
        client.get_run("x")
    with Client(endpoint, "some-other-token-here") as client, pytest.raises(Unauthenticated, match="SEXTET_TOKEN"):
        client.get_run("x")
    with Client("127.0.0.1:1", TOKEN) as client, pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        client.get_run("x")


def test_profile_asks_for_one_step_of_the_actor_unless_told_otherwise(controller: tuple[FakeController, str]) -> None:
    with Client(controller[1], TOKEN) as client:
        answers = client.profile("r"), client.profile("r", "critic", steps=3)
    assert [(call.call, call.step) for (call,) in answers] == [("actor.update", 1), ("critic.update", 3)]


async def test_async_client(controller: tuple[FakeController, str]) -> None:
    _, endpoint = controller
    async with AsyncClient(endpoint, TOKEN) as client:
        assert [event.step async for event in client.watch("r")] == [1, 2, 3, 4]


def test_endpoint_is_named_or_found(tmp_path: Path) -> None:
    assert find_controller({"SEXTET_CONTROLLER": "h:1"}, tmp_path) == "h:1"
    with pytest.raises(Unavailable, match="sextet up"):
        find_controller({}, tmp_path)
    mine = LocalState(os.getpid(), made_at(os.getpid()))
    write_state(mine, tmp_path)
    assert stat.S_IMODE((tmp_path / "local.json").stat().st_mode) == 0o600
    with pytest.raises(Unavailable):
        find_controller({}, tmp_path)
    write_state(LocalState(mine.pid, mine.created, True, "127.0.0.1:5"), tmp_path)
    assert find_controller({}, tmp_path) == "127.0.0.1:5"


def test_a_state_whose_process_is_gone_does_not_count(tmp_path: Path) -> None:
    write_state(LocalState(os.getpid(), made_at(os.getpid()) - 100, True, "127.0.0.1:5"), tmp_path)
    assert read_state(tmp_path) is None
    (tmp_path / "local.json").write_text("{")
    assert read_state(tmp_path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="psutil has the boot's time from elsewhere")
def test_a_clock_that_was_set_hides_no_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sleep of the machine, say: `sextet down` knew of none, and `sextet up` said that they run."""
    write_state(LocalState(os.getpid(), made_at(os.getpid())), tmp_path)
    boot = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 30)
    assert psutil.boot_time() == boot + 30
    assert read_state(tmp_path)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", "its log is empty"),
        ("Traceback\nValueError: x\n", "Traceback | ValueError: x"),
        ('{"event": "serving"}\nsextet rollout: --bind is wrong\nnoise\n', "sextet rollout: --bind is wrong"),
        ('{"event": "run failed", "exception": "Traceback\\nKeyError: 3"}\n', "run failed: KeyError: 3"),
        ('{"event": "call", "error": "nope"}\n{"half', 'call: nope | {"half'),
    ],
)
def test_last_words(tmp_path: Path, log: str, expected: str) -> None:
    path = tmp_path / "a.log"
    assert last_words(path) == "it has no log"
    path.write_text(log)
    assert last_words(path) == expected
