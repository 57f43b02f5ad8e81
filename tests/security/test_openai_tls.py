"""Under TLS the OpenAI endpoint is HTTPS from the caller to the gateway, and from the gateway to a rollout."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.__main__ import run
from services.gateway.settings import GatewaySettings
from services.rollout.__main__ import build
from services.rollout.settings import RolloutSettings
from sextet.certs import make_certificates
from shared.rpc.run import serve_role
from shared.state import open_store
from shared.state.registry import list_replicas

TOKEN = "token-of-the-tests-0123456789"
STORE = "memory://openai-tls"


async def test_from_caller_to_rollout_by_certificates(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    common: dict[str, Any] = {
        "token": TOKEN, "metrics_port": -1, "redis_url": STORE, "drain_timeout": 1, "tls_dir": str(tmp_path),
    }  # fmt: skip
    rollout = RolloutSettings.model_validate({**common, "replica": "r0", "threads": 1})
    gateway = GatewaySettings.model_validate({**common, "http": "127.0.0.1:0"})
    up, stop = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(serve_role(rollout, build, started=up, stop=stop))
    await asyncio.wait_for(up.wait(), 60)
    up.clear()
    second = asyncio.create_task(run(gateway, started=up, stop=stop))
    await asyncio.wait_for(up.wait(), 60)
    [entry] = await list_replicas(open_store(STORE), "gateway")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    # It asks the session's replica, which holds no run: the answer is the rollout's.
    url, headers = f"https://{entry.facts['openai']}/v1/sessions/r0.x", {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(verify=trusted, headers=headers) as client:
        answer = await client.get(url)
        assert (answer.status_code, "no run is loaded" in answer.text) == (503, True)
        with pytest.raises(httpx.TransportError):
            await client.get(url.replace("https", "http"))
    async with httpx.AsyncClient(headers=headers) as stranger:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.get(url)
    stop.set()
    assert await asyncio.wait_for(asyncio.gather(first, second), 60) == [(0, True), 0]
