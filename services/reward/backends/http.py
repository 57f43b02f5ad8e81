"""Grades by an external service that speaks JSON over HTTP.

    POST {"run": ..., "items": [{"uid", "sample", "data_source", "prompt", "response", "ground_truth", "extra_info"}]}
    200  {"results": [{"score": 1.0, "parts": {"format": 0.5}} | {"error": "why not"}]}

One result per item, in order; an empty list of items asks whether the grader is there.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from services.reward.backend import Grade, Item, failed, valid_grade
from services.reward.external import Down, ExternalBackend, Failed, checked
from shared.rpc.errors import FailedPrecondition

MAX_ANSWER_BYTES = 16 << 20
MAX_ERROR_BYTES = 300
NO_GRADER = {301, 302, 303, 307, 308, 401, 403, 404, 405}
DOWN = {429, 502, 503, 504}


def http_backend() -> ExternalBackend:
    return ExternalBackend(HttpTransport)


class HttpTransport:
    """A client for one URL."""

    def __init__(self, endpoint: str, timeout: float) -> None:
        if not endpoint.startswith(("http://", "https://")):
            text = f"reward.endpoint={endpoint!r} must be an http:// or https:// URL when reward.backend=http"
            raise FailedPrecondition(text, key="reward.endpoint", value=endpoint)
        self._endpoint = endpoint
        self._timeout = timeout
        self._client = httpx.AsyncClient(timeout=timeout)

    async def send(self, run: str, items: Sequence[Item]) -> list[Grade]:
        try:
            body = json.dumps({"run": run, "items": [_message(item) for item in items]}).encode()
        except RecursionError:
            raise Failed("rejected", "prompt or extra_info: nested too deeply") from None
        try:
            async with asyncio.timeout(self._timeout):
                return checked(_grades(await self._post(body)), items)
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout):
            raise Failed("timeout", f"no answer within reward.timeout={self._timeout:g} s") from None
        except httpx.InvalidURL as error:
            text = f"reward.endpoint={self._endpoint!r}: {error}"
            raise FailedPrecondition(text, key="reward.endpoint", value=self._endpoint) from None
        except httpx.HTTPError as error:
            raise Down(f"{type(error).__name__}: {error}") from None

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(self, body: bytes) -> bytes:
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", self._endpoint, content=body, headers=headers) as response:
            limit = MAX_ANSWER_BYTES if response.status_code == 200 else MAX_ERROR_BYTES
            answer = b""
            async for chunk in response.aiter_bytes():
                answer += chunk
                if len(answer) > limit:
                    break
        if response.status_code == 200 and len(answer) > limit:
            raise Failed("shape", f"an answer of more than {limit >> 20} MiB")
        if response.status_code != 200:
            raise self._refusal(response.status_code, answer[:limit].decode(errors="replace"))
        return answer

    def _refusal(self, status: int, text: str) -> Exception:
        why = f"HTTP status {status}: {text}"
        if status in DOWN:
            return Down(why)
        if status in NO_GRADER:
            what = f"reward.endpoint={self._endpoint!r} is no grader: {why}"
            return FailedPrecondition(what, key="reward.endpoint", value=self._endpoint)
        return Failed("rejected", why, transient=status >= 500)


def _message(item: Item) -> dict[str, Any]:
    return {
        "uid": item.uid,
        "sample": item.sample,
        "data_source": item.data_source,
        "prompt": item.prompt,
        "response": item.response,
        "ground_truth": item.ground_truth,
        "extra_info": item.extra_info,
    }


def _grades(body: bytes) -> list[Grade]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Failed("shape", f"not JSON: {error}") from None
    results = answer.get("results") if isinstance(answer, Mapping) else None
    if not isinstance(results, list):
        raise Failed("shape", 'no list "results" in the answer')
    return [_grade(result) for result in results]


def _grade(result: Any) -> Grade:
    if not isinstance(result, Mapping):
        return failed("shape", 'a result that is not {"score"} or {"error"}')
    if "score" not in result:
        return failed("rejected", str(result.get("error", 'a result without "score" and "error"')))
    return (
        failed("rejected", str(result["error"]))
        if result.get("error")
        else valid_grade(result["score"], result.get("parts"))
    )
