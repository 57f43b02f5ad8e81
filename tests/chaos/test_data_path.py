"""A holder of blocks is killed or frozen while it is read from: the reader says so in time."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shared.batch.reader import BatchReader
from shared.gen.sextet.v1 import batch_pb2
from shared.rpc.client import Connections
from shared.rpc.errors import BatchLost

HOLDER = """
import asyncio
import grpc.aio
import numpy as np
from shared.batch.block import Block, Ragged, RowKey
from shared.batch.store import BatchStore, DataServicer
from shared.gen.sextet.v1 import batch_pb2, batch_pb2_grpc
from shared.rpc.interceptors import Guard
from shared.rpc.options import SERVER_OPTIONS

class Slow(DataServicer):
    async def Read(self, request, context):
        async for message in super().Read(request, context):
            yield message
            await asyncio.sleep(0.1)

async def main():
    store = BatchStore(1 << 30)
    server = grpc.aio.server(interceptors=[Guard("t")], options=SERVER_OPTIONS)
    batch_pb2_grpc.add_DataServiceServicer_to_server(Slow(store), server)
    store.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    block = Block((RowKey("p", 0),), {"x": Ragged.from_rows([np.zeros(100 << 20, np.uint8)], "uint8")})
    ref = store.put(block, run="r", step=1, tokens=[1])
    print(batch_pb2.BatchRef(blocks=[ref]).SerializeToString().hex(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait(timeout=30)


@pytest.mark.chaos
@pytest.mark.parametrize(("how", "within"), [(signal.SIGKILL, 20.0), (signal.SIGSTOP, 35.0)])
async def test_a_holder_that_stops_in_the_middle_is_lost(holder, how, within):
    assert holder.stdout
    ref = batch_pb2.BatchRef.FromString(bytes.fromhex(holder.stdout.readline()))
    connections = Connections("t")
    reading = asyncio.create_task(BatchReader(connections, unreachable_after=2).read(ref, timeout=60))
    await asyncio.sleep(1)
    assert not reading.done()
    holder.send_signal(how)
    began = time.monotonic()
    with pytest.raises(BatchLost, match=ref.blocks[0].block):
        await reading
    assert time.monotonic() - began < within
    await connections.close()
