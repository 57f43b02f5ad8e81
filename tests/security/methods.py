"""Every method that any service has, from the generated descriptors: a new one is in the tests at once."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

import shared.gen.sextet.v1 as generated


@dataclass(frozen=True)
class Method:
    """A method and its request type; `streams` says whether requests or responses come as a stream."""

    service: str
    name: str
    request: type[Any]
    streams: tuple[bool, bool] = (False, False)

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    def __str__(self) -> str:
        return f"{self.service.rpartition('.')[2]}.{self.name}"

    async def call(self, channel: grpc.aio.Channel, request: bytes = b"", **options: Any) -> list[bytes]:
        """Sends these bytes, whatever they are; the answers as bytes."""
        if self.streams == (True, True):
            return [each async for each in channel.stream_stream(self.path)(iter([request]), **options)]
        if self.streams[1]:
            return [each async for each in channel.unary_stream(self.path)(request, **options)]
        return [await channel.unary_unary(self.path)(request, **options)]


def sextet_methods() -> list[Method]:
    """All methods of protos/sextet/v1."""
    return [
        Method(service.full_name, method.name, GetMessageClass(method.input_type),
               (method.client_streaming, method.server_streaming))
        for service in _services() for method in service.methods
    ]  # fmt: skip


def standard_methods() -> list[Method]:
    """Health and reflection, as the packages define them."""
    health = health_pb2.DESCRIPTOR.services_by_name["Health"]
    reflection = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    return [
        Method(service.full_name, method.name, GetMessageClass(method.input_type),
               (method.client_streaming, method.server_streaming))
        for service in (health, reflection) for method in service.methods
        if service is reflection or hasattr(health_pb2_grpc.HealthServicer, method.name)
    ]  # fmt: skip


def recording_services(calls: list[str]) -> list[tuple[Any, Any]]:
    """(add, servicer) for every service; a servicer that only notes which method was reached."""
    return [(add, _recorder(base, service, calls)) for service, base, add in _servicers()]


def _services() -> list[Any]:
    files = [importlib.import_module(f"{generated.__name__}.{name}") for name in _modules("_pb2")]
    return [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]


def _servicers() -> Iterator[tuple[Any, type[Any], Any]]:
    known = {service.name: service for service in _services()}
    for name in _modules("_pb2_grpc"):
        module = importlib.import_module(f"{generated.__name__}.{name}")
        for class_name, base in inspect.getmembers(module, inspect.isclass):
            if class_name.endswith("Servicer"):
                yield known[class_name.removesuffix("Servicer")], base, getattr(module, f"add_{class_name}_to_server")


def _recorder(base: type[Any], service: Any, calls: list[str]) -> Any:
    def unary(path: str, answer: type[Any]) -> Any:
        async def reached(self: Any, request: Any, context: Any) -> Any:
            calls.append(path)
            return answer()

        return reached

    def streaming(path: str, answer: type[Any]) -> Any:
        async def reached(self: Any, request: Any, context: Any) -> Any:
            calls.append(path)
            yield answer()

        return reached

    body = {
        method.name: (streaming if method.server_streaming else unary)(
            f"/{service.full_name}/{method.name}", GetMessageClass(method.output_type)
        )
        for method in service.methods
    }
    return type(f"Recording{service.name}", (base,), body)()


def _modules(suffix: str) -> list[str]:
    return sorted(each.name for each in pkgutil.iter_modules(generated.__path__) if each.name.endswith(suffix))
