"""What every incoming call goes through: token, deadline, error mapping, metrics, logs."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from shared import failpoints
from shared.config import ConfigError
from shared.rpc.client import TOKEN_HINT
from shared.rpc.errors import Internal, InvalidArgument, SextetError, Unauthenticated, status_message, trailing_metadata
from shared.rpc.tls import check_caller
from shared.telemetry import metrics

log = structlog.get_logger()

# The standard probes (Kubernetes, Compose, load balancers) carry no token.
_OPEN = ("/grpc.health.v1.Health/Check",)
# Standard clients watch without a deadline.
_NO_DEADLINE = ("/grpc.health.v1.Health/Watch", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")


class Guard(grpc.aio.ServerInterceptor):
    """Checks and measures every call, and turns exceptions into statuses.

    Args:
        token: what callers must present as `authorization: Bearer TOKEN`.
    """

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        method: str = handler_call_details.method
        if method not in _OPEN and not self._authorized(handler_call_details.invocation_metadata):
            # A stream handler answers before the request is read: a stranger's 64 MiB are never parsed.
            return grpc.stream_stream_rpc_method_handler(_refuse)
        handler = await continuation(handler_call_details)
        return None if handler is None else _wrapped(handler, method)

    def _authorized(self, metadata: Any) -> bool:
        given = next((value for key, value in metadata or () if key == "authorization"), "")
        return hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected)


async def _refuse(_requests: Any, context: Any) -> None:
    # Without names: a stranger must not make label values.
    metrics.RPC_REQUESTS.labels("", "", grpc.StatusCode.UNAUTHENTICATED.name).inc()
    await _abort(context, Unauthenticated(f"the token is missing or wrong: {TOKEN_HINT}"))


def _wrapped(handler: Any, method: str) -> Any:
    """The handler, its calls checked and measured."""
    if handler.response_streaming:
        inner = handler.stream_stream or _readable(handler.unary_stream)

        async def stream(request: Any, context: Any) -> None:
            async with _call(method, context):
                await _forward(inner(request, context), context)

        streaming = handler.request_streaming
        make = grpc.stream_stream_rpc_method_handler if streaming else grpc.unary_stream_rpc_method_handler
        return make(stream, _lenient(handler.request_deserializer), handler.response_serializer)  # type: ignore[arg-type]
    answer = _readable(handler.stream_unary or handler.unary_unary)

    async def unary(request: Any, context: Any) -> Any:
        if failpoints.on() and hasattr(request, "operation"):
            name = request.operation.id.name
            await failpoints.hit_async(f"{name}.arrived")
            context.add_done_callback(lambda _: failpoints.hit(f"{name}.replied"))
        async with _call(method, context):
            return await answer(request, context)

    make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    return make(unary, _lenient(handler.request_deserializer), handler.response_serializer)


class _Unreadable:
    """In the place of a request whose bytes are no message."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _lenient(deserialize: Any) -> Any:
    """gRPC would answer UNKNOWN to what can't be parsed, and log a traceback; this leaves it to `_readable`."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Unreadable(str(error))

    return read


def _readable(answer: Any) -> Any:
    def checked(request: Any, context: Any) -> Any:
        if isinstance(request, _Unreadable):
            raise InvalidArgument(f"the request can't be read: {request.reason}")
        return answer(request, context)

    return checked


async def _forward(result: Any, context: Any) -> None:
    """A streaming method is an async generator, or a coroutine that writes to the context itself."""
    if hasattr(result, "__aiter__"):
        async for response in result:
            await context.write(response)
    else:
        await result


@asynccontextmanager
async def _call(method: str, context: Any) -> AsyncIterator[None]:
    service, _, name = method.strip("/").rpartition("/")
    began, code = time.monotonic(), grpc.StatusCode.OK
    try:
        check_caller(method, context)
        if method not in _NO_DEADLINE and context.time_remaining() is None:
            raise InvalidArgument(f"{method} was called without a deadline: pass a `timeout`")
        yield
        code = context.code() or code
    except grpc.aio.AbortError:
        code = _code(context)
        raise
    except asyncio.CancelledError:
        code = grpc.StatusCode.CANCELLED
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: everything becomes a status
        known = as_sextet_error(error)
        code = known.code
        _log(method, known, error)
        await _abort(context, known)
    finally:
        metrics.RPC_REQUESTS.labels(service, name, code.name).inc()
        metrics.RPC_SECONDS.labels(service, name).observe(time.monotonic() - began)


def as_sextet_error(error: Exception) -> SextetError:
    """What a caller is told about an exception."""
    if isinstance(error, SextetError):
        return error
    if isinstance(error, ConfigError):
        return InvalidArgument(str(error))
    return Internal(f"{type(error).__name__}: {error}")


async def _abort(context: Any, error: SextetError) -> None:
    await context.abort(error.code, status_message(error), trailing_metadata(error))


def _code(context: Any) -> grpc.StatusCode:
    code = context.code()
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def _log(method: str, known: SextetError, error: Exception) -> None:
    if not isinstance(known, Internal):
        log.info("rpc refused", method=method, code=known.code.name, error=status_message(known))
    else:
        log.error("rpc failed", method=method, code=known.code.name, error=status_message(known), exc_info=error)
