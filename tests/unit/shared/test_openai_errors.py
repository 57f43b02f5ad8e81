"""A client can't tell the gateway's refusals from a rollout's."""

from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from services.gateway import app as gateway
from services.rollout.openai import app as rollout

ROOT = Path(__file__).parents[3]
FACES = {"gateway": gateway.make_app, "rollout": rollout.make_app}


async def refusal(face: str, method: str, path: str, token: str) -> tuple[int, dict[str, Any]]:
    transport = httpx.ASGITransport(FACES[face](cast(Any, None), "secret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://face") as client:
        answer = await client.request(method, path, headers={"authorization": f"Bearer {token}"})
        return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("method", "path", "token", "status", "kind", "code"),
    [
        ("GET", "/v1/models", "wrong", 401, "authentication_error", "invalid_api_key"),
        ("GET", "/v1/nothing/there", "secret", 404, "not_found_error", None),
        ("PUT", "/v1/models", "secret", 405, "invalid_request_error", None),
    ],
)
async def test_both_faces_refuse_alike(
    method: str, path: str, token: str, status: int, kind: str, code: str | None
) -> None:
    answers = [await refusal(face, method, path, token) for face in FACES]
    assert answers[0] == answers[1]
    assert answers[0][0] == status
    error = answers[0][1]["error"]
    assert error == {"message": error["message"], "type": kind, "param": None, "code": code}
    assert error["message"]


def test_the_shape_is_written_once() -> None:
    files = [path for room in ("services", "shared", "sextet") for path in (ROOT / room).rglob("*.py")]
    found = [str(path.relative_to(ROOT)) for path in files if '"invalid_request_error"' in path.read_text()]
    assert found == ["shared/openai.py"]
