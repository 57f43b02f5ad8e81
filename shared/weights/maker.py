"""The ranks of a maker that is several processes: each holds its shards, and none of them the whole model.

Rank 0 answers for all of them. What it wants of the others while they compute goes over a group of its own, to a thread
of each: to send its shards to the members of a gathering, or to hand over its part of one tensor for a stream.
"""

import dataclasses
import math
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from shared.gen.sextet.v1 import weights_pb2
from shared.rpc.errors import NotFound
from shared.training.group import ALONE, Group
from shared.weights.codec import DTYPES, Snapshot, complete
from shared.weights.memory import device_name, share_memory, this_host
from shared.weights.part import WirePart
from shared.weights.plan import Box

log = structlog.get_logger()
_MISSING = -1


class MakerRanks:
    """One rank's view of all.

    Args:
        group: of these ranks.
    """

    def __init__(self, group: Group = ALONE) -> None:
        self._group = group
        self._beside: Group | None = None
        self._asking = threading.Lock()
        self._part: WirePart | None = None

    def complete(self, held: Snapshot, find: Callable[[str, int], Snapshot]) -> Snapshot:
        """The snapshot with the digests of whole tensors, and what each rank holds. By all ranks together.

        Args:
            find: the snapshot of a run's version on this rank; raises NotFound.

        Raises:
            ValueError: ranks that hold the same differ; the tensor is named.
        """
        if self._group.size == 1:
            return held
        device = held.memory.device
        own = weights_pb2.WeightRank(host=this_host(), device=device_name(device), pieces=held.pieces)
        if device.type == "cuda":
            own.memory.CopyFrom(share_memory(held.memory))
        ranks = tuple(map(weights_pb2.WeightRank.FromString, self._group.gather(own.SerializeToString())))
        told = map(weights_pb2.WeightsManifest.FromString, self._group.gather(held.manifest.SerializeToString()))
        manifest = weights_pb2.WeightsManifest(version=held.manifest.version, tensors=_merged(told))
        if self._beside is None:
            self._beside = self._group.beside()
            if self._group.rank:
                threading.Thread(target=self._follow, args=(find,), name="weights-rank", daemon=True).start()
        whole = dataclasses.replace(held, manifest=manifest, ranks=ranks)
        return complete(whole, (piece for rank in ranks for piece in rank.pieces))

    def send(self, run: str, version: int, answer: weights_pb2.JoinResponse) -> None:
        """Has the other ranks send their shards."""
        if self._beside is not None:
            with self._asking:
                self._tell(weights_pb2.MakerCommand(run=run, version=version, send=answer))

    def whole(self, run: str, held: Snapshot, without: Collection[str] = ()) -> Iterator[Tensor]:
        """Each tensor of a version but those `without`, whole and on the CPU, one after the other.

        Raises:
            NotFound: another rank does not hold the version any more.
        """
        if not held.ranks:
            yield from (tensor.cpu() for name, tensor in held.by_name.items() if name not in without)
            return
        holders = _holders(held)
        for info in held.manifest.tensors:
            if not info.alias_of and info.name not in without:
                yield self._gathered(run, held, info, holders[info.name])

    def _gathered(self, run: str, held: Snapshot, info: weights_pb2.TensorInfo, holders: dict[Box, int]) -> Tensor:
        whole = torch.empty(tuple(info.shape), dtype=DTYPES[info.dtype])
        others = sorted(set(holders.values()) - {0})
        with self._asking:
            if others:
                version = held.manifest.version
                self._tell(weights_pb2.MakerCommand(run=run, version=version, tensor=info.name, ranks=others))
            # Every rank holds one box of a tensor. All answer, whatever one of them lacks.
            parts = {box: self._part_of(rank, box, info) for box, rank in holders.items() if rank}
        for box, rank in holders.items():
            part = parts[box] if rank else held.by_name[info.name]
            if part is None:
                raise NotFound(
                    f"rank {rank} of the maker does not hold tensor {info.name!r} of this version any more, "
                    "or has no memory to hand it over"
                )
            whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = part
        return whole

    def _part_of(self, rank: int, box: Box, info: weights_pb2.TensorInfo) -> Tensor | None:
        assert self._beside is not None
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, rank, group=self._beside.control)
        if int(size) == _MISSING:
            return None
        part = torch.empty(box.size, dtype=DTYPES[info.dtype])
        dist.recv(part.reshape(-1).view(torch.uint8), rank, group=self._beside.control)
        return part

    def _tell(self, command: weights_pb2.MakerCommand) -> None:
        assert self._beside is not None
        self._beside.broadcast(command.SerializeToString())

    def _follow(self, find: Callable[[str, int], Snapshot]) -> None:
        """What the other ranks do beside computing, all their life."""
        assert self._beside is not None
        while True:
            self._obey(weights_pb2.MakerCommand.FromString(self._beside.broadcast()), find)

    def _obey(self, command: weights_pb2.MakerCommand, find: Callable[[str, int], Snapshot]) -> None:
        try:
            held = find(command.run, command.version)
        except NotFound as error:
            held = None
            log.warning("weights are gone", rank=self._group.rank, error=str(error))
        if self._group.rank in command.ranks:
            self._hand_over(held.by_name.get(command.tensor) if held else None)
        elif command.HasField("send") and held is not None:
            # Streams go on meanwhile; WirePart takes one transfer at a time.
            threading.Thread(target=self._send, args=(command.send, held), name="weights", daemon=True).start()

    def _hand_over(self, tensor: Tensor | None) -> None:
        assert self._beside is not None
        try:
            part = None if tensor is None else tensor.cpu()
        except RuntimeError as error:
            part = None
            log.warning("weights cannot be handed over", rank=self._group.rank, error=str(error))
        if part is None:
            # Rank 0 waits for an answer.
            dist.send(torch.tensor([_MISSING]), 0, group=self._beside.control)
            return
        dist.send(torch.tensor([part.nbytes]), 0, group=self._beside.control)
        dist.send(part.reshape(-1).view(torch.uint8), 0, group=self._beside.control)

    def _send(self, answer: weights_pb2.JoinResponse, held: Snapshot) -> None:
        self._part = self._part or WirePart(_address_towards(answer.store))
        try:
            self._part.send(answer, self._group.rank, held.by_name, None)
        except Exception as error:  # noqa: BLE001 - the members and rank 0 have heard of it
            log.warning("weights not sent", rank=self._group.rank, error=str(error) or type(error).__name__)


def _merged(manifests: Iterable[weights_pb2.WeightsManifest]) -> Iterable[weights_pb2.TensorInfo]:
    """All tensors that ranks hold something of, each once: the stages of a model have tensors of their own."""
    infos: dict[str, weights_pb2.TensorInfo] = {}
    for manifest in manifests:
        for info in manifest.tensors:
            infos.setdefault(info.name, info)
    return infos.values()


def _holders(held: Snapshot) -> dict[str, dict[Box, int]]:
    """Who hands over which box of each tensor: of what several ranks hold, the first."""
    found: dict[str, dict[Box, int]] = {}
    for rank, each in enumerate(held.ranks):
        for piece in each.pieces:
            if math.prod(piece.size):
                box = Box(tuple(piece.start), tuple(piece.size))
                found.setdefault(piece.tensor, {}).setdefault(box, rank)
    return found


def _address_towards(endpoint: str) -> str:
    """This machine's address on the way to host:port; nothing is sent."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return probe.getsockname()[0]
