"""DataService's read path against raw TCP: two processes on loopback, taken in turn, so that the ratio holds.

    python bench/data.py

Read is the whole path of a role: token, deadline, 1 MiB chunks, checksums, digest, reassembly into a block.
"""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import grpc.aio
import numpy as np

from shared.batch import refs
from shared.batch.block import Block, Ragged, RowKey
from shared.batch.codec import CHUNK
from shared.batch.reader import BatchReader
from shared.batch.store import BatchStore, DataServicer
from shared.gen.sextet.v1 import batch_pb2, batch_pb2_grpc
from shared.rpc.client import Connections
from shared.rpc.interceptors import Guard
from shared.rpc.memory import keep_freed_memory
from shared.rpc.options import SERVER_OPTIONS

TOKEN = "bench"
MEBIBYTES = (1, 16, 64, 256)
TRIES = 7
ROWS = 256


def block_of(mebibytes: int) -> Block:
    """Log-probs of ROWS rows, together this large."""
    each = (mebibytes << 20) // 4 // ROWS
    data = np.random.default_rng(0).standard_normal(each * ROWS, np.float32)
    rows = tuple(RowKey(f"1:{i}:0", 0) for i in range(ROWS))
    return Block(rows, {"rollout_logprobs": Ragged(data, np.full(ROWS, each, np.uint32))})


async def serve() -> None:
    """The holder: prints its TCP port and one ref per size (hex), then serves until its input ends."""
    store = BatchStore(4 << 30)
    server = grpc.aio.server(interceptors=[Guard(TOKEN)], options=SERVER_OPTIONS)
    batch_pb2_grpc.add_DataServiceServicer_to_server(DataServicer(store), server)
    store.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    raw = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_raw, args=(raw,), daemon=True).start()
    print(raw.getsockname()[1])
    for mebibytes in MEBIBYTES:
        ref = store.put(block_of(mebibytes), run="bench", step=1, tokens=[0] * ROWS)
        print(ref.SerializeToString().hex())
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


def send_raw(listener: socket.socket) -> None:
    """Sends each caller as many bytes as it asks for (8 bytes, little-endian)."""
    chunk = bytes(CHUNK)
    while True:
        peer, _ = listener.accept()
        with peer:
            for _ in range(int.from_bytes(peer.recv(8), "little") // CHUNK):
                peer.sendall(chunk)


def receive_raw(port: int, size: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(size.to_bytes(8, "little"))
        view = memoryview(bytearray(size))
        while view:
            view = view[peer.recv_into(view) :]


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def measure(port: int, blocks: list[batch_pb2.BlockRef]) -> None:
    connections = Connections(TOKEN)
    reader = BatchReader(connections)
    print("| block MiB | raw TCP GiB/s | DataService.Read GiB/s | ratio |\n|---:|---:|---:|---:|")
    for mebibytes, block in zip(MEBIBYTES, blocks, strict=True):
        batch = refs.merge(block)
        raw, read = [], []
        for _ in range(TRIES):
            raw.append(await seconds(lambda size=mebibytes << 20: asyncio.to_thread(receive_raw, port, size)))
            read.append(await seconds(lambda batch=batch: reader.read(batch, timeout=60)))
        gibibytes = mebibytes / 1024
        fastest = gibibytes / min(raw), gibibytes / min(read)
        print(f"| {mebibytes} | {fastest[0]:.2f} | {fastest[1]:.2f} | {fastest[1] / fastest[0]:.2f} |")
    await connections.close()


def main() -> None:
    keep_freed_memory()
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
        return
    holder = subprocess.Popen([sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin
    assert holder.stdout
    try:
        port, *lines = [holder.stdout.readline().decode() for _ in range(1 + len(MEBIBYTES))]
        asyncio.run(measure(int(port), [batch_pb2.BlockRef.FromString(bytes.fromhex(line)) for line in lines]))
    finally:
        holder.stdin.close()
        holder.wait(timeout=30)


if __name__ == "__main__":
    main()
