"""Every method of every service and of the HTTP API refuses a stranger before its handler runs."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from services.controller.api_http import make_app
from services.rollout.openai.app import make_app as make_policy_app
from shared.http import MAX_BODY_BYTES
from tests.fakes.role import TOKEN
from tests.security.methods import Method, sextet_methods, standard_methods
from tests.security.serving import ROLES, real_controller, real_role, recording

METHODS = sextet_methods()
OPEN = {"/grpc.health.v1.Health/Check"}
RIGHT = (("authorization", f"Bearer {TOKEN}"),)
WRONG: dict[str, Any] = {
    "none": None,
    "empty": (("authorization", ""),),
    "wrong": (("authorization", "Bearer wrong-token-of-a-stranger"),),
    "no scheme": (("authorization", TOKEN),),
    "other scheme": (("authorization", f"Basic {TOKEN}"),),
    "longer": (("authorization", f"Bearer {TOKEN}x"),),
    "shorter": (("authorization", f"Bearer {TOKEN[:-1]}"),),
    "wrong first": (("authorization", "Bearer x"), *RIGHT),
    "other key": (("x-authorization", f"Bearer {TOKEN}"),),
}
UNIMPLEMENTED, INVALID = grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT


async def code_of(method: Method, channel: grpc.aio.Channel, metadata: Any, request: bytes = b"") -> grpc.StatusCode:
    try:
        await method.call(channel, request, timeout=10, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_the_methods_are_all_there() -> None:
    paths = {method.path for method in METHODS}
    declared = sum(text.count("\n  rpc ") for text in (p.read_text() for p in Path("protos/sextet/v1").glob("*.proto")))
    assert len(paths) == declared >= 29
    assert {str(method) for method in standard_methods()} >= {
        "Health.Check", "Health.Watch", "ServerReflection.ServerReflectionInfo"
    }  # fmt: skip


async def test_no_handler_is_reached_without_the_token() -> None:
    calls: list[str] = []
    async with recording(calls) as endpoint, grpc.aio.insecure_channel(endpoint) as channel:
        for method in [*METHODS, *standard_methods()]:
            for name, metadata in WRONG.items():
                code = await code_of(method, channel, metadata)
                expected = grpc.StatusCode.OK if method.path in OPEN else grpc.StatusCode.UNAUTHENTICATED
                assert code is expected, (method, name)
        assert calls == []
        for method in METHODS:
            assert await code_of(method, channel, RIGHT) is grpc.StatusCode.OK, method
        assert calls == [method.path for method in METHODS]


async def test_a_strangers_request_is_not_even_parsed() -> None:
    # With the token, bytes that are no message are an error of parsing; without it nobody looks at them.
    async with recording([]) as endpoint, grpc.aio.insecure_channel(endpoint) as channel:
        for method in METHODS:
            assert await code_of(method, channel, None, b"\xff" * 64) is grpc.StatusCode.UNAUTHENTICATED, method
            assert await code_of(method, channel, RIGHT, b"\xff" * 64) is INVALID, method


@pytest.mark.parametrize("role", ROLES)
async def test_the_real_roles_refuse_every_method(role: str, tmp_path: Path) -> None:
    async with real_role(role, tmp_path) as running, grpc.aio.insecure_channel(running.endpoint) as channel:
        for method in METHODS:
            for name, metadata in WRONG.items():
                assert await code_of(method, channel, metadata) is grpc.StatusCode.UNAUTHENTICATED, (method, name)
        known = [method for method in METHODS if await code_of(method, channel, RIGHT) is not UNIMPLEMENTED]
        assert {method.service for method in known} >= {"sextet.v1.RoleService", "sextet.v1.DataService"}
        assert len(known) > 6


async def test_the_real_controller_refuses_every_method(tmp_path: Path) -> None:
    async with real_controller(tmp_path) as entry, grpc.aio.insecure_channel(entry.endpoint) as channel:
        for method in METHODS:
            for name, metadata in WRONG.items():
                assert await code_of(method, channel, metadata) is grpc.StatusCode.UNAUTHENTICATED, (method, name)
        assert await code_of(METHODS[0], channel, RIGHT) is UNIMPLEMENTED


class Recorder:
    """In the place of the API: notes that a method of it was wanted."""

    def __init__(self) -> None:
        self.wanted: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.wanted.append(name)
        raise LookupError(name)


OPEN_PAGES = {"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}


def routes_of(app: Any) -> list[tuple[str, str]]:
    """Method and path of every route, as the application itself describes them."""
    return [(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods]


@pytest.mark.parametrize(("make", "least"), [(make_app, 10), (make_policy_app, 10)])
async def test_no_route_of_an_http_face_is_reached_without_the_token(make: Any, least: int) -> None:
    face = Recorder()
    app = make(face, TOKEN)
    routes = routes_of(app)
    assert len(routes) >= least
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://c") as client:
        for method, path in [*routes, ("GET", "/v1/nothing"), ("DELETE", "/v1/runs")]:
            for name, metadata in WRONG.items():
                answer = await client.request(method, path, headers=httpx.Headers(list(metadata or ())))
                assert answer.status_code == 401, (method, path, name)
                assert "the token is missing or wrong" in answer.text
        assert face.wanted == []
        for page in OPEN_PAGES:
            assert (await client.get(page)).status_code == 200


async def test_with_the_token_every_route_of_the_controller_is_reached() -> None:
    api = Recorder()
    app = make_app(api, TOKEN)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    bodies = {"/v1/runs": {"config": {}}, "/v1/services/{role}": {"replicas": 1}}
    async with httpx.AsyncClient(transport=transport, base_url="http://c") as client:
        for method, path in routes_of(app):
            await client.request(method, path, headers=dict(RIGHT), json=bodies.get(path))
    assert len(api.wanted) == len(routes_of(app))


async def test_a_strangers_body_is_not_read_and_a_huge_one_is_refused() -> None:
    app = make_app(Recorder(), TOKEN)  # type: ignore[arg-type]
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while read < 4 * MAX_BODY_BYTES:
            read += 1 << 20
            yield b" " * (1 << 20)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://c") as client:
        assert (await client.post("/v1/runs", content=endless())).status_code == 401
        assert read == 0
        answer = await client.post("/v1/runs", content=endless(), headers=dict(RIGHT))
        assert (answer.status_code, answer.json()["code"]) == (413, "RESOURCE_EXHAUSTED")
        assert read <= MAX_BODY_BYTES + (2 << 20)
