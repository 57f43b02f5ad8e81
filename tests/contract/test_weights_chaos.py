"""Who dies or freezes within a transfer: it ends in time, both sides know why, and the next one has a fresh group.

One side is a process of its own, which is killed or stopped; the other is here.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc.aio
import pytest
import torch

from shared.config import WeightsConfig
from shared.failpoints import STRUCK
from shared.gen.sextet.v1 import weights_pb2, weights_pb2_grpc
from shared.rpc.client import Connections
from shared.rpc.interceptors import Guard
from shared.rpc.options import SERVER_OPTIONS
from shared.weights import group
from shared.weights.digest import state_digest
from shared.weights.gather import Gatherings
from shared.weights.grpc import GrpcPublisher, WeightsServicer
from shared.weights.join import LocalReceiver, join
from shared.weights.part import WirePart
from tests.fakes.wire_process import TOKEN, WireProcess, weights

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]
torch.set_num_threads(1)
TIMEOUT, PLACE = 20.0, "weights.bucket.5"
OPTIONS = WeightsConfig(channel="gloo", timeout=TIMEOUT, bucket_mib=1)


class Here:
    """A maker and a member `a` in this process."""

    def __init__(self) -> None:
        self.publisher, self.gatherings, self.version = GrpcPublisher(), Gatherings(), 0
        self.server = grpc.aio.server(interceptors=[Guard(TOKEN)], options=SERVER_OPTIONS)
        servicer = WeightsServicer(self.publisher, self.gatherings)
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(servicer, self.server)
        self.publisher.endpoint = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.connections = Connections(TOKEN)
        self.receiver = LocalReceiver(WirePart("127.0.0.1"), torch.device("cpu"))

    def publish(self) -> weights_pb2.WeightsRef:
        self.version += 1
        return self.publisher.publish(self.version, weights(self.version), run="r", options=OPTIONS)

    async def take(self, ref: weights_pb2.WeightsRef, gathering: str, *members: str) -> str:
        """What went wrong with member `a`; empty when it has the version."""
        message = weights_pb2.WeightsGathering(id=gathering, members=members)
        try:
            await join(self.connections, ref, message, "a", self.receiver, 30)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return f"{type(error).__name__}: {error}"
        assert state_digest(self.receiver.tensors) == ref.digest
        return ""


@pytest.fixture
async def here(monkeypatch):
    monkeypatch.setattr(group, "SILENCE_SECONDS", 3.0)
    made = Here()
    await made.server.start()
    yield made
    made.receiver._part.close()
    await made.gatherings.close()
    await made.connections.close()
    await made.server.stop(0)


async def with_member(here: Here, member: WireProcess) -> tuple[str, asyncio.Task]:
    """A transfer to `a`, here, and `b`, there: what `a` says, and the wait for what `b` says."""
    ref = here.publish()
    member.tell(ref=ref.SerializeToString().hex(), gathering=f"g{here.version}", members=["a", "b"])
    other = asyncio.create_task(member.answer(60))
    return await here.take(ref, f"g{here.version}", "a", "b"), other


async def late_once(points: Path, seconds: float) -> None:
    """Who reaches the place next sleeps there; returns when it does."""
    struck = points / f"{PLACE}{STRUCK}"
    struck.unlink(missing_ok=True)
    (points / PLACE).write_text(f"sleep:{seconds}")
    async with asyncio.timeout(60):
        while not struck.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("bucket", [0, 5])
async def test_a_receiver_that_is_killed_at_a_bucket(here, bucket):
    member = WireProcess("member", "b", failpoints=f"weights.bucket.{bucket}=kill")
    try:
        await member.ready()
        began = time.monotonic()
        said, other = await with_member(here, member)
        assert time.monotonic() - began < TIMEOUT
        assert said.startswith("FailedPrecondition"), said
        assert "error" in await other
        assert here.receiver.holds == ""
        member.end()
        member = WireProcess("member", "b")
        await member.ready()
        said, other = await with_member(here, member)
        assert said == ""
        assert (await other)["digest"] == state_digest(here.receiver.tensors)
    finally:
        member.end()


async def test_a_receiver_that_freezes_is_named_to_all(here, tmp_path):
    member = WireProcess("member", "b", failpoints=f"@{tmp_path}")

    async def frozen_while_late() -> None:
        await late_once(tmp_path, 6)
        os.kill(member.pid, signal.SIGSTOP)

    try:
        await member.ready()
        stopping = asyncio.create_task(frozen_while_late())
        began = time.monotonic()
        said, other = await with_member(here, member)
        assert time.monotonic() - began < TIMEOUT
        assert "b has shown no sign of life for 3 s" in said, said
        await stopping
        os.kill(member.pid, signal.SIGCONT)
        assert "error" in await other
        sleeping = asyncio.create_task(late_once(tmp_path, 6))
        said, other = await with_member(here, member)
        # It slept again, and nobody stopped it: late is not dead.
        await sleeping
        assert said == ""
        assert "digest" in await other
    finally:
        member.end()


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sender_that_dies_or_freezes(here, stop, tmp_path):
    maker = WireProcess("maker", str(TIMEOUT), failpoints=f"@{tmp_path}")
    try:
        await maker.ready()
        ref = weights_pb2.WeightsRef.FromString(bytes.fromhex((await maker.ask(version=1))["ref"]))
        taking = asyncio.create_task(here.take(ref, "g1", "a"))
        await late_once(tmp_path, 8)
        assert not taking.done()
        os.kill(maker.pid, stop)
        began = time.monotonic()
        said = await taking
        assert time.monotonic() - began < TIMEOUT / 2
        assert "actor is gone" in said or "actor has not answered for 3 s" in said or "actor:" in said, said
        assert await here.take(here.publish(), "g2", "a") == "", "another actor, a fresh group"
    finally:
        maker.end()
