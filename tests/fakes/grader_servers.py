"""Fake external graders that do as the test says: `script` gets the items' responses and answers for the server.

It returns a list of scores, dicts or error texts, or raises Answer to answer something else.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from shared.gen.sextet.v1 import reward_pb2, reward_pb2_grpc

Script = Callable[[list[tuple[str, str]]], Sequence[Any]]


class Answer(Exception):
    """Answers this status (HTTP number or gRPC code) or body, after some seconds."""

    def __init__(self, status: Any = None, body: Any = None, seconds: float = 0.0) -> None:
        super().__init__(str(status))
        self.status, self.body, self.seconds = status, body, seconds


def exact(pairs: list[tuple[str, str]]) -> list[Any]:
    """1.0 where response equals truth; an error for what starts with "bad"."""
    return [
        "no grade" if response.startswith("bad") else {"score": float(response == truth), "length": len(response)}
        for response, truth in pairs
    ]


@contextlib.asynccontextmanager
async def grpc_grader(script: Script = exact) -> AsyncIterator[str]:
    class Servicer(reward_pb2_grpc.RewardServiceServicer):
        async def Score(self, request: Any, context: Any) -> Any:
            try:
                results = script([(item.response, item.ground_truth) for item in request.items])
            except Answer as answer:
                await asyncio.sleep(answer.seconds)
                return answer.body or await context.abort(answer.status, "as told")
            return reward_pb2.ScoreResponse(results=[_message(result) for result in results])

    server = grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def _message(result: Any) -> Any:
    if isinstance(result, str):
        return reward_pb2.ScoreResult(error=result)
    parts = dict(result) if isinstance(result, dict) else {"score": result}
    return reward_pb2.ScoreResult(score=parts.pop("score"), parts=parts)


@contextlib.asynccontextmanager
async def http_grader(script: Script = exact) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length:")[2].split()[0])
                status, body = await _answer(script, json.loads(await reader.readexactly(length)))
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 26)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score"
    finally:
        server.close()


async def _answer(script: Script, request: dict[str, Any]) -> tuple[int, bytes]:
    try:
        results = script([(item["response"], item["ground_truth"]) for item in request["items"]])
    except Answer as answer:
        await asyncio.sleep(answer.seconds)
        return answer.status or 200, answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
    return 200, json.dumps({"results": [_json(result) for result in results]}).encode()


def _json(result: Any) -> Any:
    if isinstance(result, str):
        return {"error": result}
    parts = dict(result) if isinstance(result, dict) else {"score": result}
    return {"score": parts.pop("score"), "parts": parts}
