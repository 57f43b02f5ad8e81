"""The receiving side of a wire transfer: joins, receives, and holds what arrived to the maker's digests."""

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from shared.gen.sextet.v1 import weights_pb2, weights_pb2_grpc
from shared.rpc.client import Connections, call
from shared.rpc.errors import FailedPrecondition, Internal, InvalidArgument
from shared.weights.agreement import digests_of
from shared.weights.codec import NOTHING, Kept, by_every_name, manifest_digest, unchanged
from shared.weights.gather import usable_channels
from shared.weights.group import WireError
from shared.weights.memory import device_name, this_host, visible_devices
from shared.weights.part import WirePart, in_thread


class Receiver(Protocol):
    """The processes of one replica that weights go to.

    Attributes:
        tensors: what arrived last, by name, where this process has it; None where only others have.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor] | None: ...

    @property
    def channels(self) -> list[str]:
        """Wire channels that they can use."""
        ...

    @property
    def holds(self) -> str:
        """Group that all of them have; empty: none."""
        ...

    @property
    def has(self) -> Mapping[str, str]:
        """Digests of tensors that all of them have already, by name."""
        ...

    def ranks(self) -> list[weights_pb2.WeightRank]:
        """Where they are and what they want."""
        ...

    async def receive(self, answer: weights_pb2.JoinResponse) -> list[weights_pb2.WeightPiece]:
        """Takes part, and answers the sums of all pieces that arrived. Raises WireError."""
        ...


class LocalReceiver:
    """This process, which takes every tensor whole.

    Args:
        kept: what it has already; `tensors` has those of them that are still the version's, too.
    """

    def __init__(self, part: WirePart, device: torch.device, kept: Kept = NOTHING) -> None:
        self._part, self._device, self._kept = part, device, kept
        self._tensors: dict[str, Tensor] = {}

    @property
    def channels(self) -> list[str]:
        return usable_channels(self._device)

    @property
    def holds(self) -> str:
        return self._part.holds

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    @property
    def has(self) -> Mapping[str, str]:
        return self._kept.digests

    def ranks(self) -> list[weights_pb2.WeightRank]:
        sees = visible_devices(self._device)
        return [weights_pb2.WeightRank(host=this_host(), device=device_name(self._device), sees=sees)]

    async def receive(self, answer: weights_pb2.JoinResponse) -> list[weights_pb2.WeightPiece]:
        take_part = self._part.receive
        received, pieces = await in_thread(lambda: take_part(answer, answer.first_rank, self._device), answer.seconds)
        here = {name: self._kept.tensors[name] for name in unchanged(answer.manifest, self.has)}
        self._tensors = by_every_name(answer.manifest, {**here, **received})
        return pieces


async def join(
    connections: Connections,
    ref: weights_pb2.WeightsRef,
    gathering: weights_pb2.WeightsGathering,
    member: str,
    receiver: Receiver,
    timeout: float,
) -> weights_pb2.WeightsManifest:
    """Brings a version to the receiver, every tensor verified; answers what the version is.

    Raises:
        InvalidArgument: the reference names nobody who holds the version.
        FailedPrecondition: the transfer failed, or the gathering went on without this member; the cause is told.
        Internal: what arrived is not what was sent; the tensor is named.
        NotFound, Unavailable, DeadlineExceeded: the maker does not hold the version, or does not answer.
    """
    if not ref.endpoints:
        raise InvalidArgument(f"weights of version {ref.version} name no endpoint to take them from")
    request = weights_pb2.JoinRequest(
        run=ref.run, version=ref.version, gathering=gathering, member=member,
        channels=receiver.channels, ranks=receiver.ranks(), holds=receiver.holds, has=receiver.has,
    )  # fmt: skip
    stub = weights_pb2_grpc.WeightsServiceStub(connections.channel(ref.endpoints[0]))
    answer = await call(stub.Join, request, timeout=timeout)
    if not answer.manifest.digest == manifest_digest(answer.manifest) == ref.digest:
        raise Internal(f"version {ref.version} has digest {answer.manifest.digest}, not {ref.digest}")
    try:
        pieces = await receiver.receive(answer)
    except WireError as error:
        raise FailedPrecondition(f"weights of version {ref.version} by {answer.channel}: {error}") from error
    _verify(answer.manifest, pieces, unchanged(answer.manifest, receiver.has))
    return answer.manifest


def _verify(
    manifest: weights_pb2.WeightsManifest, pieces: list[weights_pb2.WeightPiece], here: Collection[str]
) -> None:
    infos = {info.name: info for info in manifest.tensors}
    try:
        found = digests_of(pieces, {name: info.shape for name, info in infos.items()})
    except ValueError as error:
        raise Internal(f"version {manifest.version}: {error}") from error
    arrived = {infos[name].alias_of or name for name in found} | set(here)
    for name, info in infos.items():
        if not info.alias_of and name not in arrived:
            raise Internal(f"version {manifest.version}: tensor {name!r} did not arrive whole")
    for name, digest in found.items():
        if digest != infos[name].digest:
            raise Internal(f"version {manifest.version}: tensor {name!r} has digest {digest}, not {infos[name].digest}")
