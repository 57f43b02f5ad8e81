"""The gRPC weight channel: a chunked stream from a holder of a version to whoever serves it next."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import aclosing
from typing import Any

import torch
from torch import Tensor

from shared.batch.codec import Corrupt, TooLarge
from shared.config import WeightsConfig
from shared.failpoints import hit_async
from shared.gen.sextet.v1 import weights_pb2, weights_pb2_grpc
from shared.rpc.client import Connections, stream
from shared.rpc.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SextetError,
    Unavailable,
)
from shared.weights import codec
from shared.weights.gather import Gatherings, offers
from shared.weights.maker import MakerRanks

CHANNEL = "grpc"
_PAUSES = (0.0, 0.1, 0.5)
"""Seconds before each round over the endpoints."""


class GrpcPublisher:
    """Holds the latest versions for WeightsServicer. See shared/weights/channel.py.

    Args:
        endpoint: host:port of this process's WeightsService; set once it is bound.
        keep: versions held; each costs the model's size in memory.
        ranks: those that publish together, each of them by a publisher of its own; only rank 0 serves.
    """

    def __init__(self, endpoint: str = "", keep: int = 2, ranks: MakerRanks | None = None) -> None:
        self.endpoint, self.ranks = endpoint, ranks or MakerRanks()
        self._keep = keep
        self._options: dict[str, WeightsConfig] = {}
        self._held: dict[tuple[str, int], codec.Snapshot] = {}

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        run: str,
        options: WeightsConfig | None = None,
        dtype: torch.dtype | None = None,
        exact: Collection[str] = (),
    ) -> weights_pb2.WeightsRef:
        self._held.pop((run, version), None)
        # Room is made first, so that never more than `keep` versions are in memory; a running fetch keeps its own.
        for oldest in list(self._held)[: len(self._held) - self._keep + 1]:
            del self._held[oldest]
        held = self.ranks.complete(codec.snapshot(version, tensors, dtype, exact), self.held)
        self._held[run, version], self._options[run] = held, options or WeightsConfig(channel=CHANNEL)
        return weights_pb2.WeightsRef(
            run=run,
            version=version,
            endpoints=[self.endpoint],
            digest=held.manifest.digest,
            bytes=held.whole_bytes,
            channel=CHANNEL,
            offers=offers(held, options.channel) if options else (),
        )

    def release(self, run: str) -> None:
        self._options.pop(run, None)
        for key in [key for key in self._held if key[0] == run]:
            del self._held[key]

    def held(self, run: str, version: int) -> codec.Snapshot:
        """Raises NotFound, naming the versions held."""
        snapshot = self._held.get((run, version))
        if snapshot is None:
            versions = ", ".join(str(v) for r, v in list(self._held) if r == run) or "none"
            raise NotFound(f"{self.endpoint} does not hold version {version} of run {run!r}; it holds {versions}")
        return snapshot

    def kept(self, run: str, version: int) -> codec.Kept:
        held = self.held(run, version)
        digests = {info.name: info.digest for info in held.manifest.tensors}
        return codec.Kept(digests, codec.by_every_name(held.manifest, held.by_name))

    def options(self, run: str) -> WeightsConfig:
        """How the run's versions may travel."""
        return self._options.get(run, WeightsConfig(channel=CHANNEL))

    @property
    def held_bytes(self) -> int:
        return sum(snapshot.nbytes for snapshot in self._held.values())


class WeightsServicer(weights_pb2_grpc.WeightsServiceServicer):
    """Streams what a publisher holds.

    Args:
        gatherings: the maker's; without them nobody can join.
    """

    def __init__(self, publisher: GrpcPublisher, gatherings: Gatherings | None = None) -> None:
        self._publisher, self._gatherings = publisher, gatherings

    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        held = self._publisher.held(request.run, request.version)
        yield weights_pb2.FetchResponse(manifest=held.manifest)
        without = codec.unchanged(held.manifest, request.has)
        messages = codec.messages(self._publisher.ranks.whole(request.run, held, without))
        # Where several ranks hold the model, the others are waited for.
        while message := await asyncio.to_thread(next, messages, None) if held.ranks else next(messages, None):
            yield message
            await hit_async("weights.sent")

    async def Join(self, request: weights_pb2.JoinRequest, context: Any) -> weights_pb2.JoinResponse:
        if self._gatherings is None:
            raise FailedPrecondition(f"{self._publisher.endpoint} only streams: join at the actor")
        held = self._publisher.held(request.run, request.version)
        return await self._gatherings.join(request, held, self._publisher.options(request.run))


class GrpcFetcher:
    """Fetches from the first holder that delivers. See shared/weights/channel.py.

    Args:
        connections: channels to the holders.
        max_bytes: a larger version is refused before memory is taken.
        unreachable_after: seconds after which an endpoint without a connection counts as dead.
    """

    def __init__(self, connections: Connections, *, max_bytes: int = 64 << 30, unreachable_after: float = 5.0) -> None:
        self._connections = connections
        self._max_bytes = max_bytes
        self._unreachable_after = unreachable_after

    async def fetch(
        self, ref: weights_pb2.WeightsRef, timeout: float, kept: codec.Kept = codec.NOTHING
    ) -> dict[str, Tensor]:
        if ref.channel != CHANNEL or not ref.endpoints:
            raise InvalidArgument(
                f"version {ref.version} travels by {ref.channel!r} from {list(ref.endpoints)}; "
                f"this is {CHANNEL!r} and needs an endpoint"
            )
        failures: dict[str, SextetError] = {}
        try:
            async with asyncio.timeout(timeout):
                return await self._rounds(ref, time.monotonic() + timeout, failures, kept)
        except TimeoutError:
            said = "; ".join(map(str, failures.values())) or "the transfer was still running"
            raise DeadlineExceeded(f"version {ref.version} did not arrive within {timeout:g} s: {said}") from None

    async def _rounds(
        self, ref: weights_pb2.WeightsRef, deadline: float, failures: dict[str, SextetError], kept: codec.Kept
    ) -> dict[str, Tensor]:
        """Tries the endpoints in order, a few times; one that cannot be reached is not tried again."""
        alive = list(ref.endpoints)
        for pause in _PAUSES:
            await asyncio.sleep(pause)
            for endpoint in tuple(alive):
                if why := await self._connections.unreachable(endpoint, self._unreachable_after):
                    alive.remove(endpoint)
                    failures[endpoint] = Unavailable(f"{endpoint} cannot be reached: {why}", endpoint=endpoint)
                    continue
                try:
                    return await self._attempt(ref, endpoint, deadline - time.monotonic(), kept)
                except SextetError as error:
                    failures[endpoint] = error
        raise _most_telling(failures)

    async def _attempt(
        self, ref: weights_pb2.WeightsRef, endpoint: str, timeout: float, kept: codec.Kept
    ) -> dict[str, Tensor]:
        request = weights_pb2.FetchRequest(run=ref.run, version=ref.version, has=kept.digests)
        receiver = codec.Receiver(ref, self._max_bytes, kept)
        fetch = weights_pb2_grpc.WeightsServiceStub(self._connections.channel(endpoint)).Fetch
        try:
            async with aclosing(stream(fetch, request, timeout=timeout)) as messages:
                async for message in messages:
                    receiver.add(message)
            return receiver.finish()
        except Corrupt as error:
            raise Internal(f"version {ref.version} from {endpoint}: {error}", endpoint=endpoint) from None
        except TooLarge as error:
            raise ResourceExhausted(f"{endpoint}: {error}", endpoint=endpoint) from None


def _most_telling(failures: dict[str, SextetError]) -> SextetError:
    """The failure that says most: corruption before absence before an endpoint that is down."""
    for kind in (Internal, NotFound):
        for error in failures.values():
            if isinstance(error, kind):
                return error
    return list(failures.values())[-1]
