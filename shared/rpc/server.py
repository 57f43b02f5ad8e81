"""Runs a service: bind, register, serve until asked to stop, drain, leave. Exit codes are for scripts and launchers."""

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.rpc.errors import SextetError
from shared.rpc.interceptors import Guard
from shared.rpc.lifetime import orphaned, wait_until_orphaned
from shared.rpc.options import SERVER_OPTIONS
from shared.rpc.settings import ServiceSettings, split_address
from shared.state.registry import Registration, ReplicaState
from shared.state.store import StateStore, open_store
from shared.telemetry import metrics

log = structlog.get_logger()

EXIT_OK, EXIT_SETTINGS, EXIT_UNREACHABLE, EXIT_REPLACED, EXIT_WEDGED = 0, 2, 3, 4, 5
_STATE_SECONDS = 8.0
_HEALTH_SECONDS = 0.5
_MAX_CONCURRENT_RPCS = 1024
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BIND_HINT = "choose another with --bind HOST:PORT (SEXTET_BIND), port 0 picks a free one"

Services = Sequence[tuple[Callable[[Any, Any], None], Any]]


class StartError(Exception):
    """The service can't start; the text says what to change."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


async def serve(
    settings: ServiceSettings,
    services: Services,
    *,
    service_names: Sequence[str],
    describe: Callable[[], ReplicaState],
    on_bound: Callable[[str], None] | None = None,
    on_stop: Callable[[], Awaitable[None]] | None = None,
    started: asyncio.Event | None = None,
    stop: asyncio.Event | None = None,
    incarnation: str = "",
) -> int:
    """Serves until SIGTERM or SIGINT (or `stop`), then drains.

    Args:
        services: (generated add_...Servicer_to_server, servicer) pairs.
        service_names: full names for the health service, "sextet.v1.ActorService" and so on.
        describe: what the registry shows; a fault makes health NOT_SERVING.
        on_bound: told host:port for others, before anything is registered.
        on_stop: awaited after others know that this replica drains, at most `drain_timeout` seconds.
        started: set when registered and serving.
        stop: asks for the same as SIGTERM.
        incarnation: of this process; made up when empty.

    Returns:
        Exit code: 0 stopped, 2 the settings can't be used, 3 Redis can't be reached, 4 another process took the id.
        (5 is that of a process which ends itself since its engine hangs, see services/rollout/health.py.)
    """
    describe, stop = _guarded(describe), stop or asyncio.Event()
    try:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(_signals_set(stop))
            store = await _connect(settings)
            stack.push_async_callback(store.close)
            server, health, endpoint = await _listen(settings, services, service_names)
            stack.push_async_callback(server.stop, 0)
            facts = _serve_metrics(settings, endpoint, stack)
            if on_bound:
                on_bound(endpoint)
            registration = Registration(
                store,
                settings.role,
                settings.replica,
                endpoint,
                incarnation or secrets.token_hex(8),
                describe,
                settings.lease_ttl,
                facts,
            )
            await _register(registration)
            stack.push_async_callback(registration.stop)
            log.info("serving", endpoint=endpoint, services=list(service_names), **facts)
            if started:
                started.set()
            lost = await _until_stopped(stop, registration, health, service_names, describe)
            await _drain(settings, health, registration, server, on_stop)
            log.info("stopped", endpoint=endpoint)
            return EXIT_REPLACED if lost else EXIT_OK
    except StartError as error:
        print(f"sextet {settings.role}: {error}", file=sys.stderr)
        return error.exit_code


async def _connect(settings: ServiceSettings) -> StateStore:
    try:
        store = open_store(settings.redis_url)
    except ValueError as error:
        raise StartError(str(error), EXIT_SETTINGS) from None
    try:
        async with asyncio.timeout(_STATE_SECONDS):
            await store.ping()
    except SextetError as error:
        await store.close()
        raise StartError(str(error), EXIT_UNREACHABLE) from None
    except TimeoutError:
        await store.close()
        raise StartError(
            f"Redis does not answer within {_STATE_SECONDS:g} s: check --redis or SEXTET_REDIS_URL", EXIT_UNREACHABLE
        ) from None
    return store


async def _register(registration: Registration) -> None:
    try:
        await registration.start()
    except SextetError as error:
        raise StartError(str(error), EXIT_UNREACHABLE) from None


async def _listen(
    settings: ServiceSettings, services: Services, service_names: Sequence[str]
) -> tuple[grpc.aio.Server, Any, str]:
    server = grpc.aio.server(
        interceptors=[Guard(settings.token.get_secret_value())],
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=_MAX_CONCURRENT_RPCS,
    )
    for add, servicer in services:
        add(servicer, server)
    health = grpc_health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue] - missing in the stubs
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for name in service_names:
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    if settings.reflection:
        reflection.enable_server_reflection([*service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME], server)
    _check_free(settings.bind)
    if settings.tls and settings.tls.ends_soon:
        log.warning("certificate ends soon", file=str(settings.tls.cert_file), expires=settings.tls.expires.isoformat())
    try:
        port = (
            server.add_secure_port(settings.bind, settings.tls.server_credentials())
            if settings.tls
            else server.add_insecure_port(settings.bind)
        )
    except RuntimeError as error:
        raise StartError(f"can't listen on {settings.bind}: {error}; {_BIND_HINT}", EXIT_SETTINGS) from None
    await server.start()
    return server, health, settings.endpoint(port)


def _check_free(bind: str) -> None:
    """Tries the address first, since gRPC itself only says that it failed."""
    host, port = split_address(bind)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host.strip("[]"), port), family=family):
            pass
    except OSError as error:
        reason = f"port {port} is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise StartError(f"can't listen on {bind}: {reason}; {_BIND_HINT}", EXIT_SETTINGS) from None


def _serve_metrics(settings: ServiceSettings, endpoint: str, stack: contextlib.AsyncExitStack) -> dict[str, str]:
    metrics.SERVICE_INFO.labels(settings.role, settings.replica).set(1)
    if settings.metrics_port < 0:
        return {}
    host = split_address(settings.bind)[0].strip("[]")
    token = None if settings.loopback else settings.token.get_secret_value()
    try:
        server = metrics.MetricsServer(host, settings.metrics_port, token, settings.tls)
    except OSError as error:
        raise StartError(
            f"can't serve metrics on port {settings.metrics_port}: {error.strerror}; "
            "choose another with --metrics-port (SEXTET_METRICS_PORT), -1 turns them off",
            EXIT_SETTINGS,
        ) from None
    stack.callback(server.close)
    return {"metrics": f"{endpoint.rpartition(':')[0]}:{server.port}"}


async def _until_stopped(
    stop: asyncio.Event,
    registration: Registration,
    health: Any,
    service_names: Sequence[str],
    describe: Callable[[], ReplicaState],
) -> bool:
    """Waits for a reason to stop; answers whether it is that another process took the replica id."""
    tasks = [
        asyncio.create_task(stop.wait()),
        asyncio.create_task(wait_until_orphaned()),
        asyncio.create_task(registration.lost.wait()),
        asyncio.create_task(_report_health(health, registration, service_names, describe)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return registration.lost.is_set()


@contextlib.contextmanager
def _signals_set(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set the event; a second one, while draining, ends the process at once."""
    loop = asyncio.get_running_loop()

    def received(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, received, number)
    try:
        yield
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


def _guarded(describe: Callable[[], ReplicaState]) -> Callable[[], ReplicaState]:
    """A backend that can't even describe itself has a fault; it must not take the service down."""

    def guarded() -> ReplicaState:
        try:
            return describe()
        except Exception as error:
            log.exception("describe failed")
            return ReplicaState(fault=f"describe failed: {type(error).__name__}: {error}")

    return guarded


async def _report_health(
    health: Any, registration: Registration, service_names: Sequence[str], describe: Callable[[], ReplicaState]
) -> None:
    before = ("", "")
    metrics.SERVICE_HEALTHY.set(1)
    while True:
        now = describe()
        if (found := (now.fault, now.standing)) != before:
            log.warning("health changed", fault=now.fault, standing=now.standing)
            well = found == ("", "")
            status = health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", *service_names):
                await health.set(name, status)
            metrics.SERVICE_HEALTHY.set(int(well))
            before = found
            await registration.tell()
        await asyncio.sleep(_HEALTH_SECONDS)


async def _drain(
    settings: ServiceSettings,
    health: Any,
    registration: Registration,
    server: grpc.aio.Server,
    on_stop: Callable[[], Awaitable[None]] | None,
) -> None:
    # Nobody waits for the results of an orphan, and it must not be left behind.
    seconds = 0.0 if orphaned() else settings.drain_timeout
    log.info("draining", seconds=seconds)
    await health.enter_graceful_shutdown()
    await registration.drain()
    if on_stop:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + 2):
                await on_stop()
    # Answers on their way and readers of our batches get a moment.
    await server.stop(min(seconds, 2.0))
