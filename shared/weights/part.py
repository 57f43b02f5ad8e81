"""A process's part in wire transfers: one at a time, in a thread, with a group that is kept while it works."""

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from shared.gen.sextet.v1 import weights_pb2
from shared.weights.agreement import Agreement, read_agreement
from shared.weights.codec import DTYPES, laid_out
from shared.weights.digest import on_host
from shared.weights.group import Group, WireError
from shared.weights.memory import mapped_buffers
from shared.weights.plan import Piece, Place
from shared.weights.schedule import Schedule
from shared.weights.sums import box_sums
from shared.weights.wire import region, run

T = TypeVar("T")
GRACE_SECONDS = 5.0
WIDTHS = {name: dtype.itemsize for name, dtype in DTYPES.items()}


class WirePart:
    """Takes part in transfers as one rank.

    Args:
        host: address of this machine that the others reach.

    Attributes:
        seconds: what the last transfer took: "plan", "transfer", "sums".
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._group: Group | None = None
        self._agreed: tuple[str, Agreement | None] = ("", None)
        self.seconds: dict[str, float] = {}
        self._stream: torch.cuda.Stream | None = None
        self._left: list[tuple[torch.cuda.Event, Mapping[str, Tensor]]] = []
        self._lock, self._until = threading.Lock(), math.inf

    @property
    def holds(self) -> str:
        """Name of the group that the next transfer may use; empty when there is none in order."""
        group = self._group
        return group.name if group is not None and not group.cause else ""

    def send(
        self, answer: weights_pb2.JoinResponse, rank: int, tensors: Mapping[str, Tensor], store: TCPStore | None
    ) -> None:
        """Sends what this rank holds; returns when all that it sends is on its way.

        Args:
            store: the group's, where this process opened it.

        Raises:
            WireError: it ended before that.
        """
        agreement = self._agreement(answer)
        self._transfer(answer, agreement, rank, lambda: tensors, store)

    def receive(
        self, answer: weights_pb2.JoinResponse, rank: int, device: torch.device
    ) -> tuple[dict[str, Tensor], list[weights_pb2.WeightPiece]]:
        """This rank's buffers, and its pieces with the sums of what arrived in them; nothing is verified yet.

        Raises:
            WireError: it did not arrive.
        """
        agreement = self._agreement(answer)
        # Who keeps tensors of earlier versions gets memory for each: one that stays would hold on to its neighbours'.
        apart = bool(answer.ranks[rank].keeps)
        local = self._transfer(answer, agreement, rank, lambda: _buffers(agreement, rank, device, apart), None)
        try:
            with self._timed("sums"), self._beside(device):
                return dict(local), _summed(agreement, rank, local)
        except torch.OutOfMemoryError as error:
            raise WireError(f"sums of what arrived: {error}") from error

    def close(self) -> None:
        """Drops the group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _transfer(
        self,
        answer: weights_pb2.JoinResponse,
        agreement: Agreement,
        rank: int,
        buffers: Callable[[], Mapping[str, Tensor]],
        store: TCPStore | None,
    ) -> Mapping[str, Tensor]:
        """The buffers, made here so that the others hear of it if there is no room, when the transfer has ended."""
        deadline = time.monotonic() + answer.seconds
        lock = self._turn(answer.seconds, deadline)
        local: Mapping[str, Tensor] = {}
        try:
            self._left = [(ended, tensors) for ended, tensors in self._left if not ended.query()]
            local = buffers()
            device = next((tensor.device for tensor in local.values()), torch.device("cpu"))
            # The group, too: NCCL's first use makes the present stream wait for the others.
            with self._beside(device):
                group = self._joined(answer, agreement, rank, store, lock)
                with self._timed("transfer"):
                    _map(agreement, answer, rank, local)
                    run(agreement.schedule, group, local, deadline)
            return local
        except Exception as error:
            why = str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
            group = None
            if lock is self._lock:
                group, self._group = self._group, None
            said = group.give_up(why) if group is not None else why
            if lock is self._lock:
                self._leave(local)
            raise WireError(said) from error
        finally:
            lock.release()

    def _leave(self, local: Mapping[str, Tensor]) -> None:
        """Gives up the stream, what is left on which may never end; what it writes is held until it has."""
        stream, self._stream = self._stream, None
        if stream is not None:
            ended = torch.cuda.Event()
            # Where a GPU has failed, nothing is written any more.
            with contextlib.suppress(RuntimeError):
                ended.record(stream)
                self._left.append((ended, local))

    def _turn(self, seconds: float, deadline: float) -> threading.Lock:
        """Waits for the transfer before this one; what to release at the end. Raises WireError."""
        if self._lock.locked() and time.monotonic() > self._until:
            # NCCL waits without end for a member that died on its way into a group: that thread is left behind.
            self._lock, self._group, self._stream = threading.Lock(), None, None
        lock = self._lock
        if not lock.acquire(timeout=seconds):
            raise WireError("an earlier transfer has not ended")
        self._until = deadline + GRACE_SECONDS
        return lock

    @contextlib.contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """On this GPU (a thread begins on the first), a stream beside the one that computes.

        Always the same, as it has memory of its own.
        """
        if device.type != "cuda":
            yield
            return
        stream = self._stream = self._stream or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield

    def _agreement(self, answer: weights_pb2.JoinResponse) -> Agreement:
        """The layouts of a group never change, so that its plan is made once."""
        with self._timed("plan"):
            group, agreement = self._agreed
            if agreement is None or group != answer.group:
                agreement = read_agreement(answer, WIDTHS)
                self._agreed = answer.group, agreement
        return agreement

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[what] = time.perf_counter() - began

    def _joined(
        self,
        answer: weights_pb2.JoinResponse,
        agreement: Agreement,
        rank: int,
        store: TCPStore | None,
        lock: threading.Lock,
    ) -> Group:
        if self._group is None or self.holds != answer.group:
            self.close()
            routes = agreement.schedule.routes
            channel = "gloo" if answer.channel == "gloo" else "nccl"
            made = Group(
                answer.group, answer.store, self.host, channel, rank, answer.names, routes, answer.seconds, store
            )
            if lock is not self._lock:
                raise WireError(made.give_up("it was left behind"))
            self._group = made
        return self._group


async def in_thread(work: Callable[[], T], seconds: float) -> T:
    """Runs work that may hang in a thread of its own, which a process that ends does not wait for.

    Raises:
        WireError: it has not ended within `seconds` and a little more.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    outcome: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
            failure.append(error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=target, name="weights", daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), seconds + GRACE_SECONDS)
    except TimeoutError:
        raise WireError(f"the transfer hangs: it has not ended within {seconds:g} s") from None
    if failure:
        # A frame that holds an error that holds the frame keeps the tensors of all frames in between.
        raise failure.pop()
    return outcome[0]


def _buffers(agreement: Agreement, rank: int, device: torch.device, apart: bool) -> dict[str, Tensor]:
    """Empty local buffers, as large as the rank's pieces reach.

    Args:
        apart: each has memory of its own. Else those that one bucket fills lie together, as they do in it.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for piece in agreement.pieces[rank]:
        stop = tuple(o + n for o, n in zip(piece.offset, piece.box.size, strict=True))
        sizes[piece.local] = tuple(map(max, sizes.get(piece.local, stop), stop))
        dtypes[piece.local] = DTYPES[agreement.dtypes[piece.tensor]]
    nbytes = {name: math.prod(size) * dtypes[name].itemsize for name, size in sizes.items()}
    made: dict[str, Tensor] = {}
    for arriving in [] if apart else _arriving(agreement.schedule, rank):
        filled = [name for name, count in arriving.items() if count == nbytes[name]]
        made |= laid_out({name: (dtypes[name], sizes[name]) for name in filled}, device)[2]
    others = sizes.keys() - made.keys()
    return made | {name: torch.empty(sizes[name], dtype=dtypes[name], device=device) for name in others}


def _arriving(schedule: Schedule, rank: int) -> Iterator[Mapping[str, int]]:
    """For each bucket, the bytes that it brings to each local buffer of a rank, in order."""
    for bucket in schedule.buckets:
        found: Counter[str] = Counter()
        for part in bucket.parts:
            found.update({place.local: part.nbytes for place in part.destinations if place.rank == rank})
        yield found


def _map(agreement: Agreement, answer: weights_pb2.JoinResponse, rank: int, local: Mapping[str, Tensor]) -> None:
    """Copies what this rank takes from the memory of senders on this machine."""
    own = [(part, place) for part in agreement.schedule.mapped for place in part.destinations if place.rank == rank]
    if not own:
        return
    opened: dict[int, Mapping[str, Tensor]] = {}
    for part, place in own:
        sender = part.source.rank
        if sender not in opened:
            opened[sender] = mapped_buffers(answer.ranks[sender], agreement.dtypes)
        theirs = region(opened[sender], part.source, part.box.size)
        region(local, place, part.box.size).copy_(theirs, non_blocking=True)
    if (device := next(iter(local.values())).device).type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _summed(agreement: Agreement, rank: int, local: Mapping[str, Tensor]) -> list[weights_pb2.WeightPiece]:
    pieces: list[Piece] = list(agreement.pieces[rank])
    own = [region(local, Place(piece.rank, piece.local, piece.offset), piece.box.size) for piece in pieces]
    starts = [(piece.box.start, agreement.shapes[piece.tensor]) for piece in pieces]
    sums = on_host([box_sums(box, *start) for box, start in zip(own, starts, strict=True)])
    return [
        weights_pb2.WeightPiece(tensor=piece.tensor, start=piece.box.start, size=piece.box.size, sums=each)
        for piece, each in zip(pieces, sums, strict=True)
    ]
