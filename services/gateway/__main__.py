"""`python -m services.gateway`: one URL for the policy in training."""

import asyncio
import contextlib
import ssl
import sys
from typing import Any

import httpx

from services.gateway.app import LIMITS, TIMEOUT, Gateway, make_app
from services.gateway.pool import Rollouts
from services.gateway.settings import GatewaySettings
from shared.http import AddressError, serving
from shared.rpc.errors import SextetError
from shared.rpc.lifetime import tie_to_parent
from shared.rpc.server import EXIT_SETTINGS, EXIT_UNREACHABLE, serve
from shared.rpc.settings import SettingsError
from shared.state import open_store
from shared.state.registry import ReplicaState
from shared.telemetry import logs


async def run(settings: GatewaySettings, **events: Any) -> int:
    """Serves until stopped; returns the exit code (see shared.rpc.server.serve)."""
    token = settings.token.get_secret_value()
    trusted: ssl.SSLContext | bool = True
    if settings.tls:
        trusted = ssl.create_default_context(cadata=settings.tls.ca.decode())
    async with contextlib.AsyncExitStack() as stack:
        store = open_store(settings.redis_url)
        stack.push_async_callback(store.close)
        headers = {"authorization": f"Bearer {token}"}
        options = {"headers": headers, "timeout": TIMEOUT, "limits": LIMITS, "verify": trusted}
        client = await stack.enter_async_context(httpx.AsyncClient(**options))
        rollouts = Rollouts(store)
        await rollouts.refresh()
        watching = asyncio.create_task(rollouts.watch())
        stack.callback(watching.cancel)
        app = make_app(Gateway(rollouts, client, "https" if settings.tls else "http"), token)
        address = await stack.enter_async_context(serving(app, settings.http, settings))
        return await serve(
            settings,
            [],
            service_names=[],
            describe=lambda: ReplicaState(running=rollouts.load.total(), facts={"openai": address}),
            **events,
        )


def main() -> int:
    """Reads settings and serves."""
    try:
        settings = GatewaySettings.load()
        logs.configure(settings.role, settings.replica, settings.log_level)
        tie_to_parent()
        return asyncio.run(run(settings))
    except (SettingsError, AddressError) as error:
        print(f"sextet gateway: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    except SextetError as error:
        print(f"sextet gateway: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE


if __name__ == "__main__":
    sys.exit(main())
