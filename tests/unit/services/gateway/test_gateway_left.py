"""Callers that leave the gateway: what their requests held is given back, whenever that is."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

import httpx

from services.gateway.app import Gateway, make_app
from services.gateway.pool import Rollouts
from shared.state.memory import MemoryStore
from shared.state.registry import Replica

TOKEN = "t"


class Answer(httpx.AsyncByteStream):
    """A replica's, on its connection."""

    def __init__(self) -> None:
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"{}"

    async def aclose(self) -> None:
        self.closed = True


async def left_by_its_caller(answer: Callable[[httpx.Request], Any], *replicas: str) -> Rollouts:
    """Sends a request whose caller leaves while it is worked on; returns the gateway's view of these replicas."""
    store = MemoryStore()
    for name in replicas:
        entry = Replica("rollout", name, "", name, "ready", "r", 1, 0, {"openai": f"{name}:1"})
        await store.put(f"sextet:replicas:rollout:{name}", json.dumps(asdict(entry)).encode())
    rollouts, body = Rollouts(store), [{"type": "http.request", "body": b"{}", "more_body": False}]
    await rollouts.refresh()

    async def receive() -> dict[str, Any]:
        return body.pop() if body else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {
        # As uvicorn says.
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        **{"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""},
        "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
    }
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        app = make_app(Gateway(rollouts, client, "http"), TOKEN)
        async with asyncio.timeout(60):
            await app(scope, receive, send)
    return rollouts


async def test_a_caller_that_leaves_after_a_busy_replica_was_asked_leaves_neither_load_nor_a_connection() -> None:
    """The first one's answer was kept for the case that no other has a better one, and then forgotten."""
    busy, asked = Answer(), []

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if len(asked) > 1:
            await asyncio.sleep(3600)
        return httpx.Response(503, stream=busy)

    rollouts = await left_by_its_caller(answer, "r0", "r1")
    assert sorted(asked) == ["r0", "r1"]
    assert (rollouts.load.total(), busy.closed) == (0, True)
