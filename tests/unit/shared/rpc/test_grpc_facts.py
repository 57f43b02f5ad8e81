"""The measured facts behind options.py, on the pinned grpcio with grpc.aio: what gRPC does alone, what ours do."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc

from shared.gen.sextet.v1 import role_pb2, role_pb2_grpc
from shared.rpc import errors
from shared.rpc.client import Connections, call
from shared.rpc.options import CHANNEL_OPTIONS, KEEPALIVE_MS, MAX_MESSAGE_BYTES, SERVER_OPTIONS
from tests.fakes.ports import kept_port
from tests.fakes.process import RoleProcess, role_process
from tests.fakes.role import CONFIG_JSON, TOKEN, RunningRole

MIB = 1024 * 1024


class Echo(grpc.GenericRpcHandler):
    """Answers what it got; "/t/wait" waits; counts calls; fails the first `failures` of them."""

    def __init__(self, failures: int = 0) -> None:
        self.calls, self.failures = 0, failures

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self.wait if handler_call_details.method == "/t/wait" else self.echo)

    async def echo(self, request: bytes, context: Any) -> bytes:
        self.calls += 1
        if self.calls <= self.failures:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return request

    async def wait(self, request: bytes, context: Any) -> bytes:
        await asyncio.sleep(60)
        return request


@contextlib.asynccontextmanager
async def served(options: Any, handler: Echo | None = None, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((handler or Echo(),))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def echo(port: int, options: Any, payload: bytes = b"x", method: str = "/t/echo", timeout: float = 10.0) -> bytes:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        return await channel.unary_unary(method)(payload, timeout=timeout)


async def code_of(awaitable: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code(), caught.value.details() or ""


async def test_grpc_receives_4_mib_and_we_receive_64() -> None:
    async with served(()) as port:
        code, _ = await code_of(echo(port, CHANNEL_OPTIONS, b"x" * 5 * MIB))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with served(SERVER_OPTIONS) as port:
        assert len(await echo(port, CHANNEL_OPTIONS, b"x" * 20 * MIB)) == 20 * MIB
        code, _ = await code_of(echo(port, (("grpc.max_send_message_length", -1),), b"x" * (MAX_MESSAGE_BYTES + 1)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_servers_share_a_port_unless_reuseport_is_off() -> None:
    async with served(()) as port, served((), port=port) as again:
        assert again == port
    async with served(SERVER_OPTIONS) as port:
        with pytest.raises(RuntimeError):
            async with served(SERVER_OPTIONS, port=port):
                pass


EAGER = (("grpc.keepalive_time_ms", 200), ("grpc.keepalive_timeout_ms", 5000), ("grpc.http2.max_pings_without_data", 0))


@pytest.mark.slow
async def test_eager_pings_are_cut_off_unless_the_server_allows_them() -> None:
    async with served(()) as port:
        began = time.monotonic()
        code, details = await code_of(echo(port, EAGER, method="/t/wait", timeout=20))
        cut_off_after = time.monotonic() - began
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "too many pings" in details.lower() or "too_many_pings" in details.lower()
    async with served((*SERVER_OPTIONS, ("grpc.http2.min_ping_interval_without_data_ms", 100))) as port:
        code, _ = await code_of(echo(port, EAGER, method="/t/wait", timeout=cut_off_after + 2))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_every_option_is_one_that_grpc_knows() -> None:
    """gRPC ignores unknown names without a word, so a misspelt one is only seen when it is needed."""
    library = Path(cygrpc.__file__).read_bytes()
    names = [name for name, _ in (*CHANNEL_OPTIONS, *SERVER_OPTIONS)]
    assert [name for name in names if name.encode() + b"\0" not in library] == []


def test_our_clients_ping_less_often_than_our_servers_allow() -> None:
    assert dict(SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"] < KEEPALIVE_MS / 2


async def seconds_until_a_frozen_peer_is_noticed(frozen: RoleProcess, options: Any, patience: float) -> float:
    connections = Connections(TOKEN, options)
    stub = role_pb2_grpc.RoleServiceStub(connections.channel(frozen.endpoint))
    await call(stub.Describe, role_pb2.DescribeRequest(), timeout=5)
    os.kill(frozen.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(errors.Unavailable) as caught:
        await call(stub.Describe, role_pb2.DescribeRequest(), timeout=patience)
    assert caught.value.details["endpoint"] == frozen.endpoint
    await connections.close()
    return time.monotonic() - began


async def test_a_frozen_peer_is_noticed_by_unanswered_pings() -> None:
    quick = (("grpc.keepalive_time_ms", 500), ("grpc.keepalive_timeout_ms", 500), ("grpc.http2.ping_timeout_ms", 500))
    with role_process() as frozen:
        assert await seconds_until_a_frozen_peer_is_noticed(frozen, quick, 60) < 20


@pytest.mark.slow
async def test_a_frozen_peer_is_noticed_within_10_seconds_with_our_options() -> None:
    with role_process() as frozen:
        assert await seconds_until_a_frozen_peer_is_noticed(frozen, (), 60) < 10


@pytest.mark.slow
async def test_an_idle_call_of_many_pings_is_not_cut_off_with_our_options() -> None:
    with role_process("--configure-seconds", "30") as role:
        connections = Connections(TOKEN)
        stub = role_pb2_grpc.RoleServiceStub(connections.channel(role.endpoint))
        request = role_pb2.ConfigureRequest(config_json=CONFIG_JSON)
        request.operation.id.run = request.operation.id.name = "x"
        assert (await call(stub.Configure, request, timeout=60)).version == 0
        await connections.close()


async def test_a_returning_server_is_found_within_seconds() -> None:
    with kept_port() as port:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            method = channel.unary_unary("/t/echo")
            away = time.monotonic() + 3
            while time.monotonic() < away:
                assert (await code_of(method(b"x", timeout=0.5)))[0] in (
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                )
                await asyncio.sleep(0.05)
            async with served(SERVER_OPTIONS, port=port):
                began = time.monotonic()
                await method(b"x", timeout=10, wait_for_ready=True)
                assert time.monotonic() - began < 5


RETRIES = """{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.01s",
    "maxBackoff": "0.01s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""


async def test_service_config_retries_stop_silently_above_256_kib() -> None:
    retrying = (("grpc.service_config", RETRIES), ("grpc.enable_retries", 1))
    async with served((), Echo(failures=1)) as port:
        assert await echo(port, retrying) == b"x"
    handler = Echo(failures=1)
    async with served((), handler) as port:
        code, _ = await code_of(echo(port, retrying, b"x" * 300 * 1024))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert handler.calls == 1
    handler = Echo(failures=1)
    async with served((), handler) as port:
        await code_of(echo(port, (*CHANNEL_OPTIONS, ("grpc.service_config", RETRIES))))
        assert handler.calls == 1, "our channels do not retry behind our back"


async def test_pick_first_sends_everything_to_one_replica() -> None:
    handlers = [Echo(), Echo()]
    async with served((), handlers[0]) as first, served((), handlers[1]) as second:
        target = f"ipv4:127.0.0.1:{first},127.0.0.1:{second}"
        async with grpc.aio.insecure_channel(target) as channel:
            for _ in range(10):
                await channel.unary_unary("/t/echo")(b"x", timeout=5)
    assert sorted(handler.calls for handler in handlers) == [0, 10]


async def test_an_http_proxy_in_the_environment_is_not_used(role: RunningRole, monkeypatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    async with grpc.aio.insecure_channel(role.endpoint) as channel:
        diverted = role_pb2_grpc.RoleServiceStub(channel).Describe(
            role_pb2.DescribeRequest(), timeout=2, metadata=metadata
        )
        assert (await code_of(diverted))[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert (await call(role.role.Describe, role_pb2.DescribeRequest(), timeout=5)).role == "fake"


async def test_grpc_drops_calls_that_wait_to_be_taken_up_and_ours_do_not() -> None:
    async def outcomes(port: int) -> list[Any]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            method = channel.unary_unary("/t/echo")
            return await asyncio.gather(*(method(b"x", timeout=30) for _ in range(4000)), return_exceptions=True)

    async with served(()) as port:
        dropped = [each for each in await outcomes(port) if isinstance(each, grpc.aio.AioRpcError)]
        assert {error.code() for error in dropped} == {grpc.StatusCode.CANCELLED}
    async with served(SERVER_OPTIONS) as port:
        assert await outcomes(port) == [b"x"] * 4000
