"""HTTP faces: the token before anything else, bounded bodies, and a server in this event loop."""

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import grpc
import uvicorn
from fastapi import HTTPException, Request

from shared.rpc.settings import ServiceSettings, is_loopback, split_address

OPEN_PAGES = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
MAX_BODY_BYTES = 4 << 20
STOP_SECONDS = 2
GONE_SECONDS = 0.5
"""How often a caller is looked after."""
T = TypeVar("T")
STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""HTTP statuses of our errors."""


class AddressError(ValueError):
    """The face can't listen there; the text says what to change."""


class Guard:
    """ASGI middleware: asks for the token before a route is looked up or a byte of the body is read; bounds the body.

    Args:
        token: what callers must present as `Authorization: Bearer TOKEN`.
        refusal: makes the answer to those who do not, an ASGI application, from the sentence.
    """

    def __init__(self, app: Any, token: str, refusal: Callable[[str], Any]) -> None:
        self._app, self._expected, self._refusal = app, f"Bearer {token}".encode(), refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PAGES:
            given = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                text = "the token is missing or wrong: send Authorization: Bearer $SEXTET_TOKEN"
                await self._refusal(text)(scope, receive, send)
                return
        await self._app(scope, _bounded(receive), send)


def _bounded(receive: Any) -> Any:
    read = 0

    async def bounded() -> Any:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > MAX_BODY_BYTES:
            raise HTTPException(413, f"a body of more than {MAX_BODY_BYTES >> 20} MiB")
        return message

    return bounded


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled when nobody waits for the answer any more.

    Raises:
        HTTPException: 499, the caller has left.
    """
    working = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({working}, timeout=GONE_SECONDS))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the caller has left")
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


@contextlib.asynccontextmanager
async def serving(app: Any, address: str, settings: ServiceSettings) -> AsyncIterator[str]:
    """Serves an application meanwhile; yields host:port for others.

    Args:
        address: host:port of --http; port 0 picks a free one.
        settings: the service's: whether others may reach it, under which name, and its certificate.

    Raises:
        AddressError: it can't listen there.
    """
    listener = _listen(address, settings.loopback)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=STOP_SECONDS,
        # Browsers and curl have no certificate of ours: the token is what they show.
        ssl_certfile=settings.tls.cert_file if settings.tls else None,
        ssl_keyfile=settings.tls.key_file if settings.tls else None,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        host = settings.advertise or split_address(address)[0]
        yield f"{socket.gethostname() if host in ('0.0.0.0', '[::]') else host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=STOP_SECONDS + 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _listen(address: str, loopback: bool) -> socket.socket:
    host, port = split_address(address)
    if not host or port < 0:
        raise AddressError(f"--http {address} is not host:port")
    if loopback and not is_loopback(host):
        raise AddressError(
            f"--http {address} is reachable from other machines and --bind is not: set both, and a token"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise AddressError(f"can't listen on {address}: {error.strerror}; choose another with --http") from None


class _Server(uvicorn.Server):
    """Leaves signals to `shared.rpc.server.serve`, which stops all faces in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
