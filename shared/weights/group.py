"""A group of processes that weights travel through: gloo or NCCL, apart from any process group the process has besides.

A group is made for a transfer, kept while it works, and dropped with the first thing that goes wrong. Its store is
where members meet, show that they live, and say why they give up. Nothing here waits longer than it was told to.
"""

import contextlib
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from shared.weights.schedule import Route

MEET_SECONDS = 10.0
"""For all members to come to the store, once they have agreed on it."""
BEAT_SECONDS = 0.25
SILENCE_SECONDS = 10.0
"""A member that shows no sign of life for so long ends the transfer for all."""
_SHORT, _LONG = 0.00005, 0.0005
"""Seconds between two looks at what a GPU has not done yet, a hundredth of the time that was waited."""
_LOOK_SECONDS = 0.05
"""Between two looks at whether somebody gave up, while gloo is waited for."""
_UNDER_WAY = 8
"""More than a rank ever has under way."""
_END_SECONDS = 600.0
_one_at_a_time = threading.Lock()
_abandoned: list[Any] = []
"""Groups whose work never ended."""
_NCCL = {
    # The watchdog would end the whole process when a peer dies; deadlines are kept here.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class WireError(RuntimeError):
    """A transfer cannot go on; the text says who and why."""


def open_store(host: str) -> tuple[TCPStore, str]:
    """A store that others can join, and its host:port: bound first, then published.

    Raises:
        WireError: this machine cannot listen on that host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise WireError(f"cannot listen on {host!r}: {error}") from None
    port = listener.getsockname()[1]
    # The store owns the descriptor from here on.
    store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"[{host}]:{port}" if family is socket.AF_INET6 else f"{host}:{port}"


def join_store(endpoint: str, seconds: float) -> TCPStore:
    """A connection of its own to a store. Raises WireError."""
    host, _, port = endpoint.rpartition(":")
    limit = timedelta(seconds=seconds)
    try:
        # Connections made at the same time get in each other's way: some take 5 s then.
        with _one_at_a_time:
            return TCPStore(host.strip("[]"), int(port), None, False, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise WireError(f"the sender's store {endpoint} cannot be reached: {_first_line(error)}") from None


class Group:
    """One rank's side of a group.

    Args:
        name: unique; keys in the store begin with it.
        endpoint: host:port of the store.
        host: address of this machine that the others reach.
        channel: gloo or nccl.
        rank: this one.
        names: who the ranks are, for messages.
        routes: everything that will be broadcast; a route is a communicator of its own.
        seconds: until the group stands, and for any one broadcast.

    Raises:
        WireError: it does not come about within `seconds`.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        host: str,
        channel: str,
        rank: int,
        names: Sequence[str],
        routes: Sequence[Route],
        seconds: float,
        store: TCPStore | None = None,
    ) -> None:
        self.name, self.channel, self.rank, self.names, self.routes = name, channel, rank, names, routes
        self._kept, self._backends = store, {}
        self._works: deque[Any] = deque(maxlen=_UNDER_WAY)
        deadline = time.monotonic() + seconds
        self._store = PrefixStore(name, join_store(endpoint, seconds))
        self._watch = _Watch(PrefixStore(name, join_store(endpoint, seconds)), rank, names)
        try:
            self._meet(min(deadline, time.monotonic() + MEET_SECONDS))
            self._connect(host, deadline)
        except Exception as error:
            raise WireError(self.give_up(str(error))) from error

    @property
    def cause(self) -> str:
        """Why it can't be used any more; empty while it can."""
        return self._watch.cause

    def broadcast(self, route: int, tensor: Tensor) -> Any:
        """Starts a broadcast from the route's sender; `settle` ends it."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        work = self._backends[route].broadcast([tensor], options)
        self._works.append(work)
        return work

    def settle(self, work: Any, route: int, deadline: float) -> None:
        """On the CPU: until the bytes are there. On a GPU: the present stream goes on once they are.

        Raises:
            WireError: not by `deadline`, or somebody gave up.
        """
        if self.channel == "nccl":
            work.wait()
            return
        while not _ended(work):
            self._go_on(deadline, lambda: self._others(route))
        try:
            work.wait()
        except RuntimeError as error:
            raise WireError(f"{self._others(route)}: {_first_line(error)}") from None

    def until(self, done: Callable[[], bool], deadline: float, who: Callable[[], str]) -> None:
        """Waits for `done()`. Raises WireError as `settle`, naming `who()`."""
        began = time.monotonic()
        while not done():
            self._go_on(deadline, who)
            time.sleep(min(max((time.monotonic() - began) / 100, _SHORT), _LONG))

    def forget(self) -> None:
        """Lets go of the memory of broadcasts, all of which have ended."""
        self._works.clear()

    def give_up(self, why: str) -> str:
        """Tells the others why, drops the group, and answers what was the cause: their word, if it was earlier."""
        cause = self._watch.announce(why)
        self.close()
        return cause

    def close(self) -> None:
        """Lets go of everything; of broadcasts under way once they end, which in gloo only their timeout does."""
        self._watch.stop()
        held = list(self._backends.values()), self._works, self._kept
        self._backends, self._works, self._kept = {}, deque(), None
        if all(work.is_completed() for work in held[1]):
            _end(*held)
        else:
            threading.Thread(target=_end, args=held, name="weights-close", daemon=True).start()

    def _go_on(self, deadline: float, who: Callable[[], str]) -> None:
        if self._watch.cause:
            raise WireError(self._watch.cause)
        if time.monotonic() > deadline:
            raise WireError(f"{who()} did not answer in time")

    def _meet(self, deadline: float) -> None:
        self._store.set(f"here{self.rank}", "")
        missing = [*range(len(self.names))]

        def all_here() -> bool:
            missing[:] = [rank for rank in missing if not self._store.check([f"here{rank}"])]
            return not missing

        self.until(all_here, deadline, lambda: f"{self.names[missing[0]]} did not join the group: it")

    def _connect(self, host: str, deadline: float) -> None:
        """Makes this rank's routes, in the order in which all make theirs."""
        for number, route in enumerate(self.routes):
            if self.rank in route.ranks:
                place, own = PrefixStore(f"route{number}", self._store), route.ranks.index(self.rank)
                left = max(0.1, deadline - time.monotonic())
                self._backends[number] = _backend(self.channel, place, own, len(route.ranks), host, left)
        if self.channel == "nccl":
            self._warm_up(deadline)

    def _warm_up(self, deadline: float) -> None:
        """NCCL connects with the first use."""
        token = torch.zeros(1, device="cuda")
        for number in self._backends:
            self.broadcast(number, token).wait()
            event = torch.cuda.Event()
            event.record()
            self.until(event.query, deadline, lambda number=number: self._others(number))

    def _others(self, route: int) -> str:
        return " and ".join(self.names[rank] for rank in self.routes[route].ranks if rank != self.rank)


def _ended(work: Any) -> bool:
    """Waits a moment for a broadcast by gloo; true: it has ended, one way or the other."""
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(seconds=_LOOK_SECONDS))
    return work.is_completed()


def _end(backends: list[Any], works: deque[Any], store: TCPStore | None) -> None:
    for backend in backends:
        with contextlib.suppress(Exception):
            backend.abort()
    # A backend's destructor waits for them with the interpreter lock in its hand: it may not come before they end.
    deadline = time.monotonic() + _END_SECONDS
    while any(not work.is_completed() for work in works):
        if time.monotonic() > deadline:
            _abandoned.append((backends, works, store))
            return
        time.sleep(0.05)
    works.clear()
    backends.clear()


class _Watch:
    """Shows the others that this rank lives, and notices when they do not, or when one of them gives up."""

    def __init__(self, store: PrefixStore, rank: int, names: Sequence[str]) -> None:
        self._store, self._rank, self._names = store, rank, names
        self._ended = threading.Event()
        self._told = ""
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="weights-watch", daemon=True)
        self._thread.start()

    @property
    def cause(self) -> str:
        """Why the transfer is over; empty while it is not."""
        if not self._told and time.monotonic() - self._answered > SILENCE_SECONDS:
            # A frozen sender holds up the thread, too.
            self._told = f"{self._names[0]} has not answered for {SILENCE_SECONDS:g} s"
        return self._told

    def announce(self, why: str) -> str:
        """The first cause that anybody told: this one, if nobody did. Waits for the store a moment at most."""
        found = [self._told or why]

        def tell() -> None:
            with contextlib.suppress(Exception):
                found[0] = self._store.compare_set("cause", "", f"{self._names[self._rank]}: {why}").decode()

        teller = threading.Thread(target=tell, name="weights-tell", daemon=True)
        teller.start()
        teller.join(1.0)
        return self._told or found[0]

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        seen: dict[int, tuple[int, float]] = {}
        try:
            # The first at once: of who has never given one nobody can tell that it stopped.
            while True:
                self._store.add(f"beat{self._rank}", 1)
                if self._store.check(["cause"]):
                    self._told = self._store.get("cause").decode()
                    return
                # The sender watches all, and each receiver the sender: with it the store answers.
                for rank in range(len(self._names)) if self._rank == 0 else ():
                    self._look(rank, seen)
                self._answered = time.monotonic()
                if self._ended.wait(BEAT_SECONDS):
                    return
        except RuntimeError as error:
            self._told = self._told or f"{self._names[0]} is gone: {_first_line(error)}"

    def _look(self, rank: int, seen: dict[int, tuple[int, float]]) -> None:
        beat, now = self._store.add(f"beat{rank}", 0), time.monotonic()
        if seen.get(rank, (-1, 0))[0] != beat:
            seen[rank] = (beat, now)
        elif now - seen[rank][1] > SILENCE_SECONDS and beat:
            self._told = self.announce(f"{self._names[rank]} has shown no sign of life for {SILENCE_SECONDS:g} s")


def _backend(channel: str, store: PrefixStore, rank: int, size: int, host: str, seconds: float) -> Any:
    # Later than the deadline that is kept here, whose message says who.
    limit = timedelta(seconds=seconds + 1)
    try:
        if channel == "gloo":
            options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._timeout, options._devices = limit, [ProcessGroupGloo.create_device(hostname=host)]
            options._threads = 2
            return ProcessGroupGloo(store, rank, size, options)
        from torch.distributed import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = limit
        with _environment(_NCCL):
            return ProcessGroupNCCL(store, rank, size, nccl)
    except RuntimeError as error:
        raise WireError(f"the {channel} group did not come about: {_first_line(error)}") from None


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Torch reads these when a group is made; groups of others are made with what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _first_line(error: BaseException) -> str:
    text = (str(error) or type(error).__name__).splitlines()[0]
    # gloo begins with a place in its source and ends with advice.
    return re.sub(r"^\[[^]]*\] *", "", text).partition(". This is typically")[0][:300]
