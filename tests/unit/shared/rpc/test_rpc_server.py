"""Calls over a real loopback server: token, deadline, errors, health, reflection, metrics, registration, stop."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY

from shared.gen.sextet.v1 import batch_pb2, batch_pb2_grpc, role_pb2, role_pb2_grpc
from shared.rpc import errors
from shared.rpc.client import Connections, call, stream
from shared.rpc.role import Configured
from shared.rpc.run import serve_role
from shared.state import open_store
from shared.state.registry import ReplicaState, list_replicas
from tests.fakes.role import CONFIG_JSON, TOKEN, FakeSettings, RunningRole, build_fake, fake_role

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def plain(role: RunningRole) -> grpc.aio.Channel:
    """A channel as a stranger has it: no token, no default deadline."""
    return grpc.aio.insecure_channel(role.endpoint)


async def health_of(role: RunningRole, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(role.channel)
    return (await call(stub.Check, health_pb2.HealthCheckRequest(service=service), timeout=5)).status


async def eventually(condition: Any, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_describe(role: RunningRole) -> None:
    answer = await call(role.role.Describe, role_pb2.DescribeRequest(), timeout=5)
    assert (answer.role, answer.version, answer.run, answer.fault) == ("fake", -1, "", "")
    assert answer.replica.startswith("fake-")
    assert len(answer.incarnation) == 16


@pytest.mark.parametrize(
    "metadata", [None, [("authorization", "Bearer wrong-token-of-a-stranger")], [("authorization", TOKEN)]]
)
async def test_without_the_token_nothing_is_answered(role: RunningRole, metadata: Any) -> None:
    async with plain(role) as channel:
        stub = role_pb2_grpc.RoleServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(role_pb2.DescribeRequest(), timeout=5, metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "SEXTET_TOKEN" in (caught.value.details() or "")
        reader = batch_pb2_grpc.DataServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in reader.Read(batch_pb2.ReadRequest(block="b"), timeout=5, metadata=metadata):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stranger_learns_nothing_about_methods(role: RunningRole) -> None:
    async with plain(role) as channel:
        unknown = channel.unary_unary("/sextet.v1.Nothing/Here")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_wrong_token_names_the_variable_and_the_endpoint(role: RunningRole) -> None:
    connections = Connections("another-token-of-the-tests")
    stub = role_pb2_grpc.RoleServiceStub(connections.channel(role.endpoint))
    with pytest.raises(errors.Unauthenticated, match="SEXTET_TOKEN") as caught:
        await call(stub.Describe, role_pb2.DescribeRequest(), timeout=5)
    assert caught.value.details["endpoint"] == role.endpoint
    await connections.close()


async def test_a_call_without_deadline_is_refused_by_the_server(role: RunningRole) -> None:
    async with plain(role) as channel:
        stub = role_pb2_grpc.RoleServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(role_pb2.DescribeRequest(), metadata=[("authorization", f"Bearer {TOKEN}")])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "timeout" in (caught.value.details() or "")


async def test_our_client_does_not_even_send_one(role: RunningRole) -> None:
    with pytest.raises(ValueError, match="timeout"):
        await role.role.Describe(role_pb2.DescribeRequest())


async def test_errors_arrive_as_the_class_that_was_raised(role: RunningRole) -> None:
    stub = batch_pb2_grpc.DataServiceStub(role.channel)
    with pytest.raises(errors.NotFound, match="nowhere") as caught:
        async for _ in stream(stub.Read, batch_pb2.ReadRequest(block="nowhere"), timeout=5):
            pass
    assert caught.value.details["block"] == "nowhere"
    request = configure(epoch=1)
    request.config_json = '{"modle": 1}'
    with pytest.raises(errors.InvalidArgument, match="did you mean 'model'"):
        await call(role.role.Configure, request, timeout=5)
    stage = role_pb2.StageCheckpointRequest(operation=configure(1, name="stage").operation)
    with pytest.raises(errors.Unimplemented, match="no state"):
        await call(role.role.StageCheckpoint, stage, timeout=5)


async def test_a_call_whose_channel_is_closed_is_cancelled_and_who_waits_is_not(
    role: RunningRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def configured(*_: Any) -> Configured:
        begun.set()
        await go_on.wait()
        return Configured(0, {})

    monkeypatch.setattr(role.parts.backend, "configure", configured)
    late = role.role
    asked = asyncio.create_task(call(role.role.Configure, configure(1), timeout=60))
    await asyncio.wait_for(begun.wait(), 60)
    await role.connections.drop(role.endpoint)
    with pytest.raises(errors.Cancelled, match="channel was closed"):
        await asked
    # A loop that looks around between the asking for a channel and the call.
    with pytest.raises(errors.Cancelled, match=r"did not begin: Channel is closed\."):
        await call(late.Configure, configure(1), timeout=60)
    asked = asyncio.create_task(call(role.role.Configure, configure(1), timeout=60))
    await asyncio.wait([asked], timeout=0.1)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    go_on.set()


async def test_a_defect_is_internal_and_names_its_type(role: RunningRole, monkeypatch) -> None:
    def broken() -> int:
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(role.parts.backend, "version", broken)
    with pytest.raises(errors.Internal, match="ZeroDivisionError: of the test"):
        await call(role.role.Describe, role_pb2.DescribeRequest(), timeout=5)


async def test_nobody_there_is_unavailable_and_names_the_endpoint() -> None:
    connections = Connections(TOKEN)
    stub = role_pb2_grpc.RoleServiceStub(connections.channel("127.0.0.1:9"))
    with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:9") as caught:
        await call(stub.Describe, role_pb2.DescribeRequest(), timeout=5)
    assert caught.value.details == {"endpoint": "127.0.0.1:9"}
    await connections.close()


async def test_attempts_end_at_their_deadline_and_the_work_goes_on() -> None:
    async with fake_role(configure_seconds=0.4) as role:
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await call(role.role.Configure, configure(1), timeout=0.1)
        assert caught.value.details["endpoint"] == role.endpoint
        described = await call(role.role.Describe, role_pb2.DescribeRequest(), timeout=5)
        assert [operation.name for operation in described.running] == ["configure"]
        assert (await call(role.role.Configure, configure(1), timeout=5)).facts == {"engine": "fake"}
        assert role.parts.backend.calls == [("configure", "r", "")]


async def test_metrics_count_calls_by_code(role: RunningRole) -> None:
    labels = {"service": "sextet.v1.RoleService", "method": "ReleaseRun", "code": "INVALID_ARGUMENT"}
    before = REGISTRY.get_sample_value("sextet_rpc_requests_total", labels) or 0
    with pytest.raises(errors.InvalidArgument):
        await call(role.role.ReleaseRun, role_pb2.ReleaseRunRequest(), timeout=5)

    async def counted() -> bool:  # the answer is sent before the call is counted
        return REGISTRY.get_sample_value("sextet_rpc_requests_total", labels) == before + 1

    await eventually(counted)


async def test_health_needs_no_token_and_follows_the_backends_fault(role: RunningRole) -> None:
    async with plain(role) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        checked = await stub.Check(health_pb2.HealthCheckRequest(service="sextet.v1.RoleService"), timeout=5)
        assert checked.status == SERVING
    role.parts.backend.now_fault = "the engine died"

    async def unhealthy() -> bool:
        return await health_of(role) == await health_of(role, "sextet.v1.DataService") == NOT_SERVING

    await eventually(unhealthy)
    assert (await call(role.role.Describe, role_pb2.DescribeRequest(), timeout=5)).fault == "the engine died"
    role.parts.backend.now_fault = ""

    async def healthy() -> bool:
        return await health_of(role) == SERVING

    await eventually(healthy)


async def test_a_backend_that_can_not_describe_itself_has_a_fault(role: RunningRole, monkeypatch) -> None:
    monkeypatch.setattr(role.parts.backend, "fault", lambda: 1 / 0)

    async def unhealthy() -> bool:
        return await health_of(role) == NOT_SERVING

    await eventually(unhealthy)
    assert not role.served.done()


async def reflected(role: RunningRole) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(role.channel)

    async def ask():
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    responses = stub.ServerReflectionInfo(ask(), timeout=5, metadata=[("authorization", f"Bearer {TOKEN}")])
    return [service.name async for answer in responses for service in answer.list_services_response.service]


async def test_reflection_is_for_development() -> None:
    async with fake_role(reflection=True) as role:
        assert "sextet.v1.RoleService" in await reflected(role)
    async with fake_role() as role:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected(role)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_registered_while_it_serves_draining_then_gone() -> None:
    store = open_store("memory://registered")
    async with fake_role(redis_url="memory://registered", lease_ttl=0.3, configure_seconds=1.0) as role:
        (replica,) = await list_replicas(store, "fake")
        assert (replica.endpoint, replica.state, replica.run, replica.version) == (role.endpoint, "ready", "", -1)
        assert replica.facts["pid"]
        described = await call(role.role.Describe, role_pb2.DescribeRequest(), timeout=5)
        assert replica.incarnation == described.incarnation
        configuring = asyncio.create_task(call(role.role.Configure, configure(1), timeout=5))

        async def state_is(state: str) -> bool:
            return [r.state for r in await list_replicas(store)] == [state]

        await eventually(lambda: state_is("busy"))
        role.stop.set()
        await eventually(lambda: state_is("draining"))
        assert await health_of(role) == NOT_SERVING
        with pytest.raises(errors.Unavailable, match="shutting down"):
            await call(role.role.Configure, configure(1, part="new"), timeout=5)
        assert (await configuring).version == 0
        assert await role.served == (0, True)
        assert await list_replicas(store) == []


async def test_work_that_outlasts_the_drain_is_given_up_and_said_to_be_unclean() -> None:
    async with fake_role(configure_seconds=30.0, drain_timeout=0.2) as role:
        configuring = asyncio.create_task(call(role.role.Configure, configure(1), timeout=20))
        await eventually(lambda: asyncio.sleep(0, bool(role.context.operations.running())))
        role.stop.set()
        with pytest.raises(errors.Unavailable):
            await configuring
        assert await role.served == (0, False)


async def test_two_processes_with_one_id(capsys) -> None:
    async with fake_role(redis_url="memory://twins", replica="twin", lease_ttl=0.3):
        settings = FakeSettings(token=TOKEN, metrics_port=-1, redis_url="memory://twins", replica="twin", lease_ttl=0.3)
        assert await serve_role(settings, build_fake) == (3, True)
        assert "'twin'" in capsys.readouterr().err


async def test_a_port_in_use_is_named(role: RunningRole, capsys) -> None:
    settings = FakeSettings(token=TOKEN, metrics_port=-1, redis_url="memory://port", bind=role.endpoint)
    assert (await serve_role(settings, build_fake))[0] == 2
    message = capsys.readouterr().err
    assert f"port {role.endpoint.rpartition(':')[2]} is in use" in message
    assert "--bind" in message


async def test_a_metrics_port_in_use_is_named(role: RunningRole, capsys) -> None:
    port = int(role.endpoint.rpartition(":")[2])
    settings = FakeSettings(token=TOKEN, metrics_port=port, redis_url="memory://metrics")
    assert (await serve_role(settings, build_fake))[0] == 2
    assert "--metrics-port" in capsys.readouterr().err


async def test_redis_that_is_not_there(capsys) -> None:
    settings = FakeSettings(token=TOKEN, metrics_port=-1, redis_url="redis://:secret@127.0.0.1:9/0")
    started = asyncio.get_running_loop().time()
    assert (await serve_role(settings, build_fake))[0] == 3
    assert asyncio.get_running_loop().time() - started < 10
    message = capsys.readouterr().err
    assert "redis://:***@127.0.0.1:9/0" in message
    assert "SEXTET_REDIS_URL" in message
    assert "secret" not in message


def test_replica_state_defaults_are_those_of_an_idle_service() -> None:
    assert ReplicaState() == ReplicaState(run="", version=-1, running=0, fault="", facts={})


def configure(epoch: int, part: str = "", name: str = "configure") -> role_pb2.ConfigureRequest:
    request = role_pb2.ConfigureRequest(config_json=CONFIG_JSON)
    request.operation.id.run, request.operation.id.name, request.operation.id.part = "r", name, part
    request.operation.epoch = epoch
    return request
