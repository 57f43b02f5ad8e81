"""Channels to other services and calls whose failures come back as the errors of `errors.py`."""

import asyncio
import ipaddress
import re
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio

from shared.rpc.errors import (
    METADATA_KEY,
    Cancelled,
    InvalidArgument,
    SextetError,
    Unauthenticated,
    Unavailable,
    from_status,
)
from shared.rpc.options import CHANNEL_OPTIONS
from shared.rpc.settings import split_address
from shared.rpc.tls import TLS_OPTIONS, Tls, handshake_problem

_HUNG_UP = re.compile("handshake failed|Socket closed|reset by peer|Broken pipe")
TOKEN_HINT = "set SEXTET_TOKEN (or SEXTET_TOKEN_FILE) to the token the service was started with"


class Connections:
    """One channel per endpoint, made when first asked for; the token goes with every call.

    Args:
        token: the bearer token.
        options: gRPC channel options that replace those of the same name.
        tls: this process's certificate; None: plain text.
    """

    def __init__(self, token: str, options: tuple[tuple[str, int], ...] = (), tls: Tls | None = None) -> None:
        self._token, self._tls = token, tls
        self._options = tuple({**dict(CHANNEL_OPTIONS), **dict(options)}.items())
        self._channels: dict[str, grpc.aio.Channel] = {}

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        """The channel to `host:port`.

        Raises:
            InvalidArgument: it is no address.
        """
        if endpoint not in self._channels:
            interceptors: Any = (_Unary(self._token, endpoint, self._tls), _Stream(self._token, endpoint, self._tls))
            channel = self._open(endpoint, interceptors)
            # Of what gRPC can't read it makes a channel that has failed from the start and never changes: who waits for
            # it to be ready leaves a wait behind that outlives even its close, and the process can't end any more.
            if channel.get_state() is not grpc.ChannelConnectivity.IDLE:
                raise InvalidArgument(f"{endpoint!r} is no address: an endpoint is host:port")
            self._channels[endpoint] = channel
        return self._channels[endpoint]

    def _open(self, endpoint: str, interceptors: Any) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(endpoint, self._options, interceptors=interceptors)
        options, credentials = (*self._options, *TLS_OPTIONS), self._tls.channel_credentials()
        return grpc.aio.secure_channel(endpoint, credentials, options, interceptors=interceptors)

    async def unreachable(self, endpoint: str, patience: float) -> str:
        """Why there is no connection to an endpoint; "" once there is one.

        Where nobody listens any more the process has ended, and what it held with it: of an IP address that is known at
        once, while a channel would keep trying. Any other endpoint is given up after `patience` seconds.

        Raises:
            InvalidArgument: it is no address.
        """
        channel = self.channel(endpoint)
        if channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
            return ""
        try:
            async with asyncio.timeout(patience):
                if await _refuses(endpoint):
                    return "nobody listens there any more"
                await channel.channel_ready()
        except TimeoutError:
            return f"no connection within {patience:g} s"
        return ""

    async def drop(self, endpoint: str) -> None:
        """Closes the channel to an endpoint that has left; its calls, running or about to be, end with Cancelled."""
        if channel := self._channels.pop(endpoint, None):
            await channel.close(None)

    async def close(self) -> None:
        """Closes all channels."""
        for endpoint in list(self._channels):
            await self.drop(endpoint)


async def _refuses(endpoint: str) -> bool:
    """Asked of addresses only: looking up a name may take a thread, which others wait for, many seconds."""
    host, port = split_address(endpoint)
    try:
        _, writer = await asyncio.open_connection(str(ipaddress.ip_address(host.strip("[]"))), port)
    except ConnectionRefusedError:
        return True
    except (OSError, OverflowError, ValueError):
        return False
    writer.close()
    return False


async def call(method: Any, request: Any, *, timeout: float) -> Any:
    """One attempt of a unary call (a stub's method), at most `timeout` seconds.

    Raises:
        SextetError: the class that the peer raised, or that fits the transport's failure; details name the endpoint.
    """
    try:
        return await method(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        raise as_sextet_error(error) from None
    except asyncio.CancelledError:
        # A channel that is closed ends its calls as if whoever waits had been told to stop.
        if (task := asyncio.current_task()) and task.cancelling():
            raise
        raise Cancelled("the channel was closed during the call") from None
    except grpc.aio.UsageError as error:
        # It was closed between the asking for it and the call: the endpoint has left.
        raise Cancelled(f"the call did not begin: {error}") from None


async def stream(method: Any, request: Any, *, timeout: float) -> AsyncGenerator[Any, None]:
    """The messages of a server stream, which must end within `timeout` seconds; errors as for `call`."""
    responses = method(request, timeout=timeout)
    try:
        async for response in responses:
            yield response
    except grpc.aio.AioRpcError as error:
        raise as_sextet_error(error) from None
    finally:
        responses.cancel()


def as_sextet_error(error: grpc.aio.AioRpcError, endpoint: str = "") -> SextetError:
    """What an AioRpcError means."""
    trailers: Any = error.trailing_metadata() or ()
    payload = next((value for key, value in trailers if key == METADATA_KEY), None)
    message = error.details() or error.code().name
    if payload is None and endpoint:
        message = f"{endpoint}: {message}"
    if error.code() is grpc.StatusCode.UNAUTHENTICATED and "SEXTET_TOKEN" not in message:
        message = f"{message}; {TOKEN_HINT}"
    mapped = from_status(error.code(), message, payload if isinstance(payload, bytes) else None)
    if endpoint:
        mapped.details.setdefault("endpoint", endpoint)
    return mapped


class _WithToken:
    def __init__(self, token: str, endpoint: str, tls: Tls | None) -> None:
        self._authorization = ("authorization", f"Bearer {token}")
        self._endpoint, self._tls = endpoint, tls

    def _details(self, details: Any) -> grpc.aio.ClientCallDetails:
        if details.timeout is None:
            raise ValueError(f"{_text(details.method)}: every call needs a timeout")
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._authorization)
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )


class _Unary(_WithToken, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        call_ = await continuation(self._details(client_call_details), request)
        try:
            return await call_
        except grpc.aio.AioRpcError as error:
            # Only here is the endpoint known, and an error that doesn't name it helps nobody.
            known = as_sextet_error(error, self._endpoint)
            raise await self._explained(known) from None

    async def _explained(self, error: SextetError) -> SextetError:
        """Where TLS may have failed, the reason: gRPC hardly has a word for it."""
        if not (isinstance(error, Unavailable) and "failed to connect" in str(error) and _HUNG_UP.search(str(error))):
            return error
        problem = await asyncio.to_thread(handshake_problem, self._endpoint, self._tls)
        return Unauthenticated(f"{self._endpoint}: {problem}", endpoint=self._endpoint) if problem else error


class _Stream(_WithToken, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._details(client_call_details), request)


def _text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method
