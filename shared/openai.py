"""How those who speak OpenAI's API say no: the rollouts, and the gateway before them."""

from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as JSON in OpenAI's shape.

    Args:
        status: HTTP status that it is answered with; clients choose the exception by it.
        param: the field of the request that it is about.
        code: a word for programs.
    """
    kind = "server_error" if status >= 500 else KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def problem(message: str, status: int, param: str | None = None, code: str | None = None) -> JSONResponse:
    """The answer with `error_body`."""
    return JSONResponse(error_body(message, status, param, code), status)


async def _on_http_error(request: Request, error: Any) -> JSONResponse:
    return problem(str(error.detail), error.status_code)


HTTP_HANDLERS: dict[Any, Any] = {HTTPException: _on_http_error, 404: _on_http_error, 405: _on_http_error}
"""For FastAPI: what routes refuse, and what no route answers."""
