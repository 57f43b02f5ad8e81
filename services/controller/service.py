"""The controller as a process: both faces, the run queue, the watch on the registry."""

import asyncio
import contextlib
import secrets
import sys

from services.controller.api import Api
from services.controller.api_grpc import ControllerServicer
from services.controller.api_http import make_app
from services.controller.cluster import Cluster
from services.controller.leader import Leadership
from services.controller.runs import Runs
from services.controller.scalers import make_scaler
from services.controller.settings import ControllerSettings
from shared.gen.sextet.v1 import controller_pb2_grpc
from shared.http import serving
from shared.rpc.client import Connections
from shared.rpc.errors import SextetError
from shared.rpc.server import EXIT_SETTINGS, EXIT_UNREACHABLE, serve
from shared.state import lease, open_store
from shared.state.registry import ReplicaState


async def run(
    settings: ControllerSettings, started: asyncio.Event | None = None, stop: asyncio.Event | None = None
) -> int:
    """Serves until stopped; returns the exit code (see shared.rpc.server.serve)."""
    token, incarnation = settings.token.get_secret_value(), secrets.token_hex(8)
    try:
        async with contextlib.AsyncExitStack() as stack:
            store = open_store(settings.redis_url)
            stack.push_async_callback(store.close)
            await store.ping()
            connections = Connections(token, tls=settings.tls)
            stack.push_async_callback(connections.close)
            scaler = await asyncio.to_thread(make_scaler, settings.scaler, settings.log_dir, settings.placed)
            if scaler:
                stack.push_async_callback(scaler.close)
            cluster = Cluster(store, connections)
            await stack.enter_async_context(cluster.watching())
            leadership = Leadership(store, lease.owner(incarnation))
            await stack.enter_async_context(leadership.sought())
            runs = Runs(store, cluster, leadership, settings.runs_dir)
            await stack.enter_async_context(runs.playing())
            api = Api(store, runs, cluster, scaler)
            http = await stack.enter_async_context(serving(make_app(api, token), settings.http, settings))
            return await serve(
                settings,
                [(controller_pb2_grpc.add_ControllerServiceServicer_to_server, ControllerServicer(api))],
                service_names=["sextet.v1.ControllerService"],
                describe=lambda: ReplicaState(run=runs.active, running=int(bool(runs.active)), facts={"http": http}),
                started=started,
                stop=stop,
                incarnation=incarnation,
            )
    except ValueError as error:
        print(f"sextet controller: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    except SextetError as error:
        print(f"sextet controller: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
