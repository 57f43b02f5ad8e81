"""The weight versions of a rollout: fetched, verified, prepared, committed (law 4), and served on to peers."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import structlog
from torch import Tensor

from services.rollout.backend import EngineError, GenerationBackend
from shared.gen.sextet.v1 import rollout_pb2, weights_pb2
from shared.rpc.client import Connections
from shared.rpc.errors import FailedPrecondition, InvalidArgument
from shared.training.errors import ModelError
from shared.training.lora import merge_adapters
from shared.weights.channel import Fetcher, Publisher
from shared.weights.codec import NOTHING, Kept, bytes_to
from shared.weights.join import join
from shared.weights.part import WirePart

log = structlog.get_logger()


@dataclass(frozen=True)
class _Prepared:
    """A version beside the serving one.

    Attributes:
        tensors: as they were published, adapters apart; None: they are with the engine.
        digests: of those that came over a wire.
    """

    version: int
    digest: str
    tensors: Mapping[str, Tensor] | None
    digests: Mapping[str, str]


class Taken(NamedTuple):
    """What came over a wire.

    Attributes:
        tensors: None: they are with the engine already.
        received_bytes: what travelled.
    """

    tensors: Mapping[str, Tensor] | None
    digests: Mapping[str, str]
    received_bytes: int


class Wire:
    """Takes versions together with the other replicas, straight from the actor.

    Args:
        member: this replica's name in gatherings.
        timeout: seconds in which the transfer begins; the actor says how long it may take then.
    """

    def __init__(self, connections: Connections, member: str, timeout: float) -> None:
        self._connections, self._member, self._timeout = connections, member, timeout
        self._part = WirePart("127.0.0.1")

    def bind(self, host: str) -> None:
        """This machine's address for others."""
        self._part = WirePart(host)

    async def take(
        self,
        ref: weights_pb2.WeightsRef,
        gathering: weights_pb2.WeightsGathering,
        backend: GenerationBackend,
        kept: Kept | None,
    ) -> Taken:
        """A version, verified, where the engine wants it.

        Raises:
            FailedPrecondition: they do not fit the model, or as shared.weights.join.join, with its other errors.
        """
        try:
            receiver = await backend.receiver(self._part, kept)
            manifest = await join(self._connections, ref, gathering, self._member, receiver, self._timeout)
        except EngineError as error:
            raise FailedPrecondition(f"weight version {ref.version}: {error}") from error
        digests = {info.name: info.digest for info in manifest.tensors}
        return Taken(receiver.tensors, digests, bytes_to(manifest, receiver.has))

    def close(self) -> None:
        """Leaves the group."""
        self._part.close()


class Weights:
    """One run's versions. Version 0 is the model as configured, which every replica loads for itself.

    Args:
        fetcher: how versions come, verified against their digest.
        publisher: how they are served on.
        timeout: seconds a fetch may take.
        wire: how they come to all replicas at once; None: not at all.
    """

    def __init__(self, fetcher: Fetcher, publisher: Publisher, timeout: float, wire: "Wire | None" = None) -> None:
        self._fetcher, self._publisher, self._timeout, self._wire = fetcher, publisher, timeout, wire
        self._run = ""
        self._keeps, self._kept = False, NOTHING
        self._prepared: _Prepared | None = None
        self.version, self.digest = -1, ""

    def start(self, run: str, keeps: bool = False) -> None:
        """The engine has loaded version 0 of this run.

        Args:
            keeps: what a version shares with the serving one does not travel.
        """
        self.stop()
        self._run, self._keeps, self.version = run, keeps, 0

    def stop(self) -> None:
        """Holds nothing any more."""
        if self._run:
            self._publisher.release(self._run)
        if self._wire is not None:
            self._wire.close()
        self._run, self._prepared, self._kept, self.version, self.digest = "", None, NOTHING, -1, ""

    async def prepare(
        self,
        ref: weights_pb2.WeightsRef,
        backend: GenerationBackend,
        gathering: weights_pb2.WeightsGathering | None = None,
    ) -> rollout_pb2.PrepareWeightsResponse:
        """Fetches a version, or takes it together with a gathering, and hands it to the engine, beside the serving one.

        Raises:
            InvalidArgument: weights of another run.
            FailedPrecondition: they do not fit the model, or the gathering's transfer failed.
            NotFound, Unavailable, Internal, DeadlineExceeded: as Fetcher.fetch.
        """
        if ref.run != self._run:
            raise InvalidArgument(f"weights of run {ref.run!r}, but this rollout is configured for {self._run!r}")
        started = time.monotonic()
        if gathering is not None and gathering.members and self._wire is not None:
            kept = self._kept if self._keeps else None
            tensors, digests, received = await self._wire.take(ref, gathering, backend, kept)
        else:
            tensors, digests = await self._fetcher.fetch(ref, self._timeout, self._kept), {}
            here = {id(tensor) for tensor in self._kept.tensors.values()}
            received = sum({id(t): t.nbytes for t in tensors.values() if id(t) not in here}.values())
        try:
            merged = None if tensors is None else await asyncio.to_thread(merge_adapters, tensors)
            await backend.prepare_weights(ref.version, merged)
        except (EngineError, ModelError) as error:
            raise FailedPrecondition(f"weight version {ref.version} does not fit: {error}") from error
        self._prepared = _Prepared(ref.version, ref.digest, tensors, digests)
        seconds = time.monotonic() - started
        sizes = {"bytes": ref.bytes, "received": received}
        log.info("weights prepared", version=ref.version, seconds=round(seconds, 3), **sizes)
        return rollout_pb2.PrepareWeightsResponse(
            version=ref.version, digest=ref.digest, seconds=seconds, received_bytes=received
        )

    async def commit(self, version: int, digest: str, backend: GenerationBackend) -> None:
        """Serves the prepared version; the old one goes on serving when this is refused.

        Raises:
            FailedPrecondition: this version with this digest is not what is prepared.
        """
        if self._prepared is None and (version, digest) == (self.version, self.digest):
            return
        held = self._prepared
        if held is None or (held.version, held.digest) != (version, digest):
            here = "nothing" if held is None else f"version {held.version} with digest {held.digest}"
            raise FailedPrecondition(
                f"cannot serve version {version} with digest {digest}: {here} is prepared; "
                f"version {self.version} goes on serving"
            )
        try:
            await backend.commit_weights(version)
        except EngineError as error:
            raise FailedPrecondition(str(error)) from error
        self._prepared, self.version, self.digest = None, version, digest
        # What is on GPUs is the actor's to give.
        if held.tensors is not None and all(tensor.device.type == "cpu" for tensor in held.tensors.values()):
            await asyncio.to_thread(self._publisher.publish, version, held.tensors, run=self._run)
            self._kept = self._publisher.kept(self._run, version) if self._keeps else NOTHING
        elif held.tensors is not None and self._keeps:
            self._kept = Kept(held.digests, held.tensors)
        log.info("weights committed", version=version)
