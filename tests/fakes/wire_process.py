"""One side of wire transfers as a process: `maker CHANNEL` publishes and serves, `member NAME` joins and receives.

Both say so when they are ready, then take one JSON line per command and answer with one.
"""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

TOKEN = "secret"


class WireProcess:
    """A started process, as a test sees it."""

    def __init__(self, *arguments: str, failpoints: str = "", **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.wire_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "SEXTET_FAILPOINTS": failpoints, "OMP_NUM_THREADS": "1", **environ},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ready(self) -> None:
        """Waits until it takes commands: on a busy machine its imports take many seconds."""
        assert await self.answer(90) == {"ready": True}

    def tell(self, **command: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    async def answer(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), seconds)
        return json.loads(line or '{"error": "the process ended"}')

    async def ask(self, seconds: float = 60, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return await self.answer(seconds)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)


def weights(seed: int) -> dict[str, Any]:
    """12 MiB, so that 12 buckets travel."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {f"layer{n}": torch.randn(512, 512, generator=generator) for n in range(12)}


async def commands(handle: Any) -> None:
    print('{"ready": true}', flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer = await handle(**json.loads(line))
        except Exception as error:  # noqa: BLE001 - the test wants to see it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


async def make(timeout: float) -> None:
    import grpc.aio

    from shared.config import WeightsConfig
    from shared.gen.sextet.v1 import weights_pb2_grpc
    from shared.rpc.interceptors import Guard
    from shared.rpc.options import SERVER_OPTIONS
    from shared.weights.gather import Gatherings
    from shared.weights.grpc import GrpcPublisher, WeightsServicer

    publisher = GrpcPublisher()
    server = grpc.aio.server(interceptors=[Guard(TOKEN)], options=SERVER_OPTIONS)
    weights_pb2_grpc.add_WeightsServiceServicer_to_server(WeightsServicer(publisher, Gatherings()), server)
    publisher.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    options = WeightsConfig(channel="gloo", timeout=timeout, bucket_mib=1)

    async def publish(version: int) -> dict[str, Any]:
        ref = publisher.publish(version, weights(version), run="r", options=options)
        return {"ref": ref.SerializeToString().hex(), "digest": ref.digest}

    await commands(publish)


async def be(name: str) -> None:
    import torch

    from shared.gen.sextet.v1 import weights_pb2
    from shared.rpc.client import Connections
    from shared.weights.digest import state_digest
    from shared.weights.join import LocalReceiver, join
    from shared.weights.part import WirePart

    connections, receiver = Connections(TOKEN), LocalReceiver(WirePart("127.0.0.1"), torch.device("cpu"))

    async def take(ref: str, gathering: str, members: list[str], seconds: float = 30) -> dict[str, Any]:
        wanted = weights_pb2.WeightsRef.FromString(bytes.fromhex(ref))
        together = weights_pb2.WeightsGathering(id=gathering, members=members)
        await join(connections, wanted, together, name, receiver, seconds)
        return {"digest": state_digest(receiver.tensors), "group": receiver.holds}

    await commands(take)


if __name__ == "__main__":
    asyncio.run(make(float(sys.argv[2])) if sys.argv[1] == "maker" else be(sys.argv[2]))
