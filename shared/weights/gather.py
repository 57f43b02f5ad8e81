"""The maker's side of a wire transfer: members join over gRPC, then all of them get the version at once."""

import asyncio
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog
import torch
import xxhash

from shared.config import WeightsConfig
from shared.gen.sextet.v1 import weights_pb2
from shared.rpc.errors import FailedPrecondition, InvalidArgument
from shared.weights.agreement import read_agreement
from shared.weights.codec import Snapshot, unchanged
from shared.weights.group import open_store
from shared.weights.maker import MakerRanks
from shared.weights.memory import device_name, share_memory, this_host
from shared.weights.part import WIDTHS, WirePart, in_thread
from shared.weights.schedule import CPU, CPU_BUCKET, default_bucket

log = structlog.get_logger()

PATIENCE_SECONDS = 10.0
"""For members to join, after the first."""
_KEPT = 16
"""Gatherings remembered, so that who comes late hears that it is over."""


@dataclass
class _Gathering:
    """Members on their way into a group."""

    request: weights_pb2.JoinRequest
    joined: dict[str, weights_pb2.JoinRequest] = field(default_factory=dict)
    declined: set[str] = field(default_factory=set)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    agreed: "asyncio.Future[dict[str, weights_pb2.JoinResponse]]" = field(default_factory=asyncio.Future)
    closed: bool = False


class Gatherings:
    """Collects members and sends; one transfer after the other.

    Args:
        host: address of this machine that members reach.
        ranks: the processes that hold the versions together, this one the first.
    """

    def __init__(self, host: str = "127.0.0.1", ranks: MakerRanks | None = None) -> None:
        self.bind(host)
        self._ranks = ranks or MakerRanks()
        self._agreeing = asyncio.Lock()
        self._known: OrderedDict[str, _Gathering] = OrderedDict()
        self._numbers = itertools.count()
        self._last: tuple[str, str] = ("", "")
        self._endpoint, self._store = "", None
        self._tasks: set[asyncio.Task[None]] = set()

    def bind(self, host: str) -> None:
        """This machine's address for members."""
        self._host, self._part = host, WirePart(host)

    async def close(self) -> None:
        """Ends transfers under way and leaves the group."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._part.close()

    async def join(
        self, request: weights_pb2.JoinRequest, held: Snapshot, options: WeightsConfig
    ) -> weights_pb2.JoinResponse:
        """Answers when the group is complete: all members named are here, or have declined, or had their time.

        Raises:
            InvalidArgument: the gathering does not name this member.
            FailedPrecondition: it is over, or this member has no channel in common with the version.
        """
        gathering = self._of(request, held, options)
        if request.member not in gathering.request.gathering.members:
            raise InvalidArgument(f"{request.member!r} is not of gathering {request.gathering.id!r}")
        usable = set(request.channels) & set(offers(held, options.channel))
        if gathering.closed:
            raise FailedPrecondition(f"gathering {request.gathering.id!r} went on without {request.member!r}")
        if usable:
            gathering.joined[request.member] = request
        else:
            gathering.declined.add(request.member)
        if len(gathering.joined) + len(gathering.declined) == len(gathering.request.gathering.members):
            gathering.complete.set()
        if not usable:
            raise FailedPrecondition(
                f"version {held.manifest.version} travels by {', '.join(offers(held, options.channel)) or 'grpc'}; "
                f"{request.member!r} can use {', '.join(request.channels) or 'grpc'}"
            )
        return (await asyncio.shield(gathering.agreed))[request.member]

    def _of(self, request: weights_pb2.JoinRequest, held: Snapshot, options: WeightsConfig) -> _Gathering:
        gathering = self._known.get(request.gathering.id)
        if gathering is None:
            gathering = self._known[request.gathering.id] = _Gathering(request)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
            task = asyncio.create_task(self._conduct(gathering, held, options))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return gathering

    async def _conduct(self, gathering: _Gathering, held: Snapshot, options: WeightsConfig) -> None:
        try:
            await asyncio.wait_for(gathering.complete.wait(), min(PATIENCE_SECONDS, options.timeout))
        except TimeoutError:
            absent = set(gathering.request.gathering.members) - set(gathering.joined) - gathering.declined
            log.warning("weights go without members that did not join", absent=sorted(absent))
        gathering.closed = True
        if not gathering.joined:
            gathering.agreed.cancel()
            return
        version = held.manifest.version
        try:
            async with self._agreeing:
                answer, first = await asyncio.to_thread(self._agree, gathering, held, options)
                store = self._store
            gathering.agreed.set_result({name: _for(answer, first[name]) for name in gathering.joined})
            await asyncio.to_thread(self._ranks.send, gathering.request.run, version, answer)
            await in_thread(lambda: self._part.send(answer, 0, held.by_name, store), options.timeout)
            log.info("weights sent", version=version, channel=answer.channel, members=sorted(gathering.joined))
        except Exception as error:  # noqa: BLE001 - whatever it is, members that wait must hear of it
            self._last = ("", "")
            log.warning("weights not sent", version=version, error=str(error) or type(error).__name__)
            if not gathering.agreed.done():
                gathering.agreed.set_exception(FailedPrecondition(f"weights of version {version}: {error}"))
                # Those who asked hear of it; if all of them have left, nobody need.
                gathering.agreed.exception()

    def _agree(
        self, gathering: _Gathering, held: Snapshot, options: WeightsConfig
    ) -> tuple[weights_pb2.JoinResponse, Mapping[str, int]]:
        """The answer, but for `first_rank`, and each member's first rank."""
        own = weights_pb2.WeightRank(host=this_host(), device=device_name(held.memory.device), pieces=held.pieces)
        senders = held.ranks or [own]
        bucket = options.bucket_mib << 20 if options.bucket_mib else default_bucket(held.whole_bytes)
        answer = weights_pb2.JoinResponse(
            ranks=senders, senders=len(senders), manifest=held.manifest, bucket_bytes=bucket,
            seconds=options.timeout, names=["actor", *(f"actor's rank {n}" for n in range(1, len(senders)))],
        )  # fmt: skip
        first: dict[str, int] = {}
        for member, request in sorted(gathering.joined.items()):
            first[member] = len(answer.ranks)
            answer.ranks.extend(request.ranks)
            keeps = sorted(unchanged(held.manifest, request.has))
            for rank in answer.ranks[first[member] :]:
                rank.keeps.extend(keeps)
            answer.names.extend([member] * len(request.ranks))
        if options.channel == "nccl":
            for rank in answer.ranks:
                del rank.sees[:]
        schedule = read_agreement(answer, WIDTHS).schedule
        if options.channel == "ipc" and schedule.routes:
            raise ValueError("weights.channel=ipc needs rollouts that see the actor's GPU: use nccl, or auto")
        on_gpu = own.device != CPU
        answer.channel = "gloo" if not on_gpu else "nccl" if schedule.routes else "ipc"
        if schedule.mapped and not held.ranks:
            answer.ranks[0].memory.CopyFrom(share_memory(held.memory))
        if not on_gpu:
            answer.bucket_bytes = min(answer.bucket_bytes, CPU_BUCKET)
        answer.group, answer.store = self._group_for(answer, gathering)
        return answer, first

    def _group_for(self, answer: weights_pb2.JoinResponse, gathering: _Gathering) -> tuple[str, str]:
        """The last group, if all have it still and the layouts are the same; else the name and store of a fresh one.

        A group's name is its layout epoch: whatever is made of the layouts, plan and schedule, is kept with it.
        """
        layout = weights_pb2.JoinResponse()
        layout.CopyFrom(answer)
        layout.manifest.version, layout.manifest.digest = 0, ""
        for rank in layout.ranks:
            rank.ClearField("memory")
            for piece in rank.pieces:
                del piece.sums[:]
        for info in layout.manifest.tensors:
            info.digest = ""
        fingerprint = xxhash.xxh3_128_hexdigest(layout.SerializeToString(deterministic=True))
        name, known = self._last
        held_by_all = name and all(r.holds == name for r in gathering.joined.values()) and self._part.holds == name
        if not held_by_all or known != fingerprint:
            name = f"{secrets.token_hex(8)}.{next(self._numbers)}"
            self._store, self._endpoint = open_store(self._host)
            self._last = (name, fingerprint)
        return name, self._endpoint


def offers(held: Snapshot, channel: str) -> list[str]:
    """Wire channels by which a version can travel, with `weights.channel` as configured.

    Raises:
        InvalidArgument: the tensors are on a device that the channel does not serve.
    """
    if channel == "grpc" or not held.tensors:
        return []
    on_gpu = held.memory.device.type == "cuda"
    if channel == "auto":
        # On CPUs one stream per rollout is as fast, and it can start over (see docs/weights.md).
        return ["nccl", "ipc"] if on_gpu else []
    if on_gpu != (channel in ("nccl", "ipc")):
        where = "a GPU" if on_gpu else "the CPU"
        raise InvalidArgument(f"weights.channel={channel}, but the policy is on {where}: use auto")
    return [channel]


def usable_channels(device: torch.device) -> list[str]:
    """Wire channels that a receiver on this device can use."""
    return ["nccl", "ipc"] if device.type == "cuda" else ["gloo"]


def _for(answer: weights_pb2.JoinResponse, first: int) -> weights_pb2.JoinResponse:
    own = weights_pb2.JoinResponse()
    own.CopyFrom(answer)
    own.first_rank = first
    return own
