"""Passes OpenAI's requests on to rollouts. It holds no policy: answers stream through as they come."""

import asyncio
import base64
import contextlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from services.gateway.pool import Rollouts
from shared.gen.sextet.v1 import batch_pb2
from shared.http import Guard, unless_gone
from shared.openai import HTTP_HANDLERS, error_body, problem

ATTEMPTS = 3
"""Replicas that a request is tried on: one may have died a moment ago."""
TIMEOUT = httpx.Timeout(30.0, connect=2.0, read=660.0)
"""A little more than a rollout gives a request."""
LIMITS = httpx.Limits(max_connections=4096, max_keepalive_connections=256)
BUSY = (429, 503)
"""Answers after which another replica is asked: full, or without a policy now."""
PREFIX = 256
"""Characters or token ids by which a prompt's home is found."""
CLAIM_SECONDS, CLAIM_PIECE = 30.0, 1.0
"""How long a claim waits, and for how long of it at one replica."""
NO_POLICY = "no rollout serves a policy now: is a run playing (`sextet runs`)?"


class Gateway:
    """The routes' state.

    Args:
        client: carries the token.
        scheme: http, or https where certificates are set.
    """

    def __init__(self, rollouts: Rollouts, client: httpx.AsyncClient, scheme: str) -> None:
        self._rollouts, self._client, self._scheme = rollouts, client, scheme
        self._numbers = itertools.count()

    async def any(self, request: Request) -> Response:
        """Sends a request to the best replica, to another one when that is gone or can't serve."""
        body, tried = await request.body(), set[str]()
        key, last = _key(body) or f"request {next(self._numbers)}", None
        try:
            while len(tried) < ATTEMPTS and (replica := self._rollouts.choose(key, tried)):
                tried.add(replica)
                with contextlib.suppress(httpx.TransportError):
                    answer = await self._send(replica, self._rollouts.serving()[replica], request, body)
                    if last is not None:
                        await self._end(*last)
                    last = replica, answer
                    if answer.status_code not in BUSY:
                        break
        except BaseException:
            if last is not None:
                await self._end(*last)
            raise
        if last is None:
            return problem(NO_POLICY, 503)
        return self._pass_on(*last)

    async def one(self, request: Request, session: str) -> Response:
        """Sends a request to the replica that holds its session."""
        replica = session.rpartition(".")[0]
        if address := self._rollouts.address(replica):
            with contextlib.suppress(httpx.TransportError):
                return self._pass_on(replica, await self._send(replica, address, request, await request.body()))
        return problem(f"session {session!r} is lost: its replica {replica!r} is gone", 404, code="session_lost")

    async def claim(self, request: Request) -> Response:
        """The next task of whichever replica has one; 204 when none has for so long as the caller waits."""
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            patience = float(json.loads(await request.body() or b"{}").get("seconds", CLAIM_SECONDS))
            if 0 <= patience <= CLAIM_SECONDS:
                return await self._claim(request, time.monotonic() + patience)
        return problem(f"seconds: a number from 0 to {CLAIM_SECONDS:g}, or nothing", 400)

    async def _claim(self, request: Request, until: float) -> Response:
        while True:
            replicas = list(self._rollouts.serving().values())
            if not replicas:
                return problem(NO_POLICY, 503)
            first = next(self._numbers) % len(replicas)
            for place, address in enumerate((*replicas[first:], *replicas[:first]), 1):
                # All are asked, and the last of them waits a little.
                seconds = min(CLAIM_PIECE, max(0.0, until - time.monotonic())) if place == len(replicas) else 0.0
                answer = await self._ask(request, address, seconds)
                if answer is not None and answer.status_code != 204:
                    if answer.is_success and await request.is_disconnected():
                        home = self._url(address, request).rpartition("/")[0]
                        await self._client.delete(f"{home}/{answer.json()['id']}", extensions=_NAMED)
                    return Response(answer.content, answer.status_code, media_type="application/json")
            if time.monotonic() >= until:
                return Response(status_code=204)

    async def _ask(self, request: Request, address: str, seconds: float) -> httpx.Response | None:
        body, url = json.dumps({"seconds": seconds}).encode(), self._url(address, request)
        post = self._client.post(url, content=body, headers=_JSON, extensions=_NAMED)
        with contextlib.suppress(httpx.TransportError):
            answer = await unless_gone(request, post)
            if answer.status_code not in BUSY:
                return answer
        await asyncio.sleep(seconds)
        return None

    async def export(self, request: Request) -> Response:
        """Exports sessions wherever they are, as one batch; what could not be is named in `failed`."""
        asked = await request.json()
        groups: dict[str, list[str]] = defaultdict(list)
        for session in asked.get("sessions", ()):
            groups[str(session).rpartition(".")[0]].append(session)
        merged, batch, failed = {"rows": []}, batch_pb2.BatchRef(), []
        for replica, sessions in groups.items():
            body = json.dumps({**asked, "sessions": sessions}).encode()
            with contextlib.suppress(httpx.TransportError):
                url = self._url(self._rollouts.address(replica), request)
                answer = await self._client.post(url, content=body, headers=_JSON, extensions=_NAMED)
                if answer.is_success:
                    part = answer.json()
                    batch.MergeFrom(batch_pb2.BatchRef.FromString(base64.b64decode(part["batch"])))
                    merged = {**part, "rows": [*merged["rows"], *part["rows"]]}
                    continue
                failed.append({"sessions": sessions, **answer.json()})
                continue
            lost = error_body(f"replica {replica!r} is gone", 404, code="session_lost")
            failed.append({"sessions": sessions, **lost})
        if not batch.blocks:
            return JSONResponse(failed[0] if failed else error_body("sessions is empty", 400, "sessions"), 400)
        return JSONResponse({**merged, "batch": base64.b64encode(batch.SerializeToString()).decode(), "failed": failed})

    def _url(self, address: str, request: Request) -> str:
        query = f"?{request.url.query}" if request.url.query else ""
        return f"{self._scheme}://{address}{request.url.path}{query}"

    async def _send(self, replica: str, address: str, request: Request, body: bytes) -> httpx.Response:
        sent = self._client.build_request(
            request.method, self._url(address, request), content=body, headers=_JSON, extensions=_NAMED
        )
        self._rollouts.load[replica] += 1
        try:
            # Given up when the caller leaves, so that nothing is sampled for nobody.
            return await unless_gone(request, self._client.send(sent, stream=True))
        except BaseException:
            self._rollouts.load[replica] -= 1
            raise

    def _pass_on(self, replica: str, answer: httpx.Response) -> Response:
        kind = answer.headers.get("content-type")
        return StreamingResponse(self._through(replica, answer), answer.status_code, media_type=kind)

    async def _through(self, replica: str, answer: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for part in answer.aiter_raw():
                yield part
        finally:
            await self._end(replica, answer)

    async def _end(self, replica: str, answer: httpx.Response) -> None:
        self._rollouts.load[replica] -= 1
        await answer.aclose()


def make_app(gateway: Gateway, token: str) -> FastAPI:
    """The application: the paths of a rollout's OpenAI face (services/rollout/README.md), behind the token."""
    app = FastAPI(title="Sextet policy", description="The policy in training, as OpenAI's API.", version="1")
    app.add_middleware(Guard, token=token, refusal=lambda text: problem(text, 401, code="invalid_api_key"))
    for error, handler in HTTP_HANDLERS.items():
        app.exception_handler(error)(handler)

    @app.post("/v1/sessions/export")
    async def export(request: Request) -> Response:
        """Makes a batch of finished conversations."""
        return await gateway.export(request)

    @app.post("/v1/sessions/claim")
    async def claim(request: Request) -> Response:
        """A session for the run's next task."""
        return await gateway.claim(request)

    @app.api_route("/v1/sessions/{session}", methods=["GET", "DELETE"])
    @app.post("/v1/sessions/{session}/reward")
    @app.post("/sessions/{session}/v1/chat/completions")
    async def one(session: str, request: Request) -> Response:
        """Goes to the session's replica."""
        return await gateway.one(request, session)

    @app.get("/v1/models")
    @app.get("/v1/models/{name}")
    @app.post("/v1/sessions")
    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def any_(request: Request, name: str = "") -> Response:
        """Goes to any replica that serves the present weights."""
        return await gateway.any(request)

    return app


_JSON = {"content-type": "application/json"}
_NAMED = {"sni_hostname": "sextet"}
"""Certificates bear the name sextet, whatever the host (shared/rpc/tls.py)."""


def _key(body: bytes) -> str:
    """What requests with the same beginning share: the messages up to the first user's, or the prompt's beginning.

    "" for one without either (a new session): it may go anywhere.
    """
    try:
        asked = json.loads(body or b"{}")
        if "messages" in asked:
            roles = [message["role"] for message in asked["messages"]]
            return json.dumps(asked["messages"][: roles.index("user") + 1 if "user" in roles else 1])
        return json.dumps(asked["prompt"][:PREFIX]) if "prompt" in asked else ""
    except (ValueError, TypeError, KeyError):
        # What is wrong with it is the rollout's to say.
        return ""
