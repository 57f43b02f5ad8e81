"""A real server of DataService on loopback, with the interceptors that every role has."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from shared.batch.store import BatchStore, DataServicer
from shared.gen.sextet.v1 import batch_pb2_grpc
from shared.rpc.client import Connections
from shared.rpc.interceptors import Guard
from shared.rpc.options import SERVER_OPTIONS

TOKEN = "secret"


@dataclass
class Holder:
    """A process that holds blocks."""

    store: BatchStore
    server: grpc.aio.Server

    @classmethod
    async def start(cls, servicer: type[DataServicer] = DataServicer, port: int = 0) -> "Holder":
        store = BatchStore(1 << 30)
        server = grpc.aio.server(interceptors=[Guard(TOKEN)], options=SERVER_OPTIONS)
        batch_pb2_grpc.add_DataServiceServicer_to_server(servicer(store), server)
        store.endpoint = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        await server.start()
        return cls(store, server)


@pytest.fixture
async def start() -> AsyncIterator[Any]:
    """Starts holders; they are stopped after the test."""
    holders: list[Holder] = []

    async def make(servicer: type[DataServicer] = DataServicer, port: int = 0) -> Holder:
        holders.append(await Holder.start(servicer, port))
        return holders[-1]

    yield make
    for holder in holders:
        await holder.server.stop(0)


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    made = Connections(TOKEN)
    yield made
    await made.close()
