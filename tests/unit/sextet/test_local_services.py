"""Services of this machine, where no process has to be started for the test."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from sextet import local
from sextet.services import keep_up
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.rpc.errors import Unavailable
from shared.state import open_store
from tests.fakes.ports import kept_port


async def test_a_notebook_can_start_services() -> None:
    """Its event loop runs already: asyncio.run refused, and with it every training without `sextet up`."""
    assert local._controllers("memory://notebook") == []


def test_a_redis_that_was_killed_is_back_where_all_look_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looked after it: `sextet up` stayed up without one for good, and every command failed."""
    services, looks = local.LocalServices(tmp_path), iter([None])
    monkeypatch.setattr(services, "check", lambda: next(looks))
    with kept_port() as port:
        url = services._start_redis(port)
        try:
            redis = services._redis
            assert redis
            redis.process.kill()
            redis.process.wait(60)
            with pytest.raises(StopIteration):
                keep_up(services)
            asyncio.run(answers(url))
        finally:
            services.stop()


async def answers(url: str) -> None:
    store = open_store(url)
    try:
        await store.ping()
    finally:
        await store.close()


class Stalled:
    """A controller whose Redis does not answer for a while, as on a disk that five other processes are read from."""

    def __init__(self, seconds: int) -> None:
        self.asked, self.seconds = 0, seconds

    def services(self) -> list[pb.ServiceInfo]:
        self.asked += 1
        if self.asked <= self.seconds:
            raise Unavailable("Redis at redis://127.0.0.1 is not reachable (Timeout reading from socket)")
        return [pb.ServiceInfo(role=role, replica=f"{role}-0", state="ready") for role in local.ROLES]


def test_services_whose_redis_stalls_while_they_start_are_waited_for(tmp_path: Path) -> None:
    """`sextet up` ended all of them at the first such answer."""
    client: Any = Stalled(3)
    local.LocalServices(tmp_path)._wait_for_roles(client, time.monotonic() + 60)
    assert client.asked == 4


def test_a_redis_that_does_not_come_back_is_named(tmp_path: Path) -> None:
    client: Any = Stalled(10**9)
    with pytest.raises(Unavailable, match="is not reachable"):
        local.LocalServices(tmp_path)._wait_for_roles(client, time.monotonic() + 0.3)
