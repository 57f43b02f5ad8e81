"""A gateway in this event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.gateway.__main__ import run as run_gateway
from services.gateway.settings import GatewaySettings
from shared.state import open_store
from shared.state.registry import list_replicas
from tests.fakes.role import TOKEN


@contextlib.asynccontextmanager
async def gateway(store: str, token: str = TOKEN) -> AsyncIterator[str]:
    """Serves for the rollouts of this store; yields its URL."""
    settings = GatewaySettings.model_validate(
        {"token": token, "redis_url": store, "metrics_port": -1, "http": "127.0.0.1:0", "drain_timeout": 1}
    )
    started, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run_gateway(settings, started=started, stop=stop))
    await asyncio.wait_for(started.wait(), 60)
    [entry] = await list_replicas(open_store(store), "gateway")
    try:
        yield f"http://{entry.facts['openai']}"
    finally:
        stop.set()
        assert await asyncio.wait_for(task, 60) == 0
