"""Where the time of a transfer goes on one rank of bench/weights.py: copies, the wire, the host's calls."""

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch

from shared.weights import part, wire


class _Mark(NamedTuple):
    """What ends here, on the host's clock in seconds and, on a GPU, on the transfer's stream."""

    what: str
    at: float
    event: torch.cuda.Event | None


class Parts:
    """What a rank's transfers take, seen at the calls of its group; the last one counts.

    On a GPU, time between two marks is that of the stream which packs and unpacks: what is copied while NCCL sends
    another bucket shows as a copy, and the rest of that bucket's time as the wire.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._marks: list[_Mark] = []
        self._ended, self._kernels = 0.0, 0.0

    def watched(self) -> Any:
        """A context: transfers within are measured."""
        return mock.patch.object(part, "run", self._run)

    def found(self) -> dict[str, float]:
        """Milliseconds of the last transfer.

        Returns:
            `copies`, `wire`, `calls` of broadcasts: what it was busy with; `first` and `called`: when the first one and
            all of them had been called; `kernels`: NCCL's own time; `late`: from the last byte to the return. And
            the number of `broadcasts`.
        """
        spent: dict[str, float] = defaultdict(float)
        for before, mark in pairwise(self._marks):
            spent[mark.what] += _between(before, mark)
        began, called = self._marks[0], [mark.at for mark in self._marks if mark.what == "calls"]
        return {
            "copies": spent["copies"], "wire": spent["wire"], "calls": spent["calls"], "broadcasts": len(called),
            "first": (called[0] - began.at) * 1e3, "called": (called[-1] - began.at) * 1e3, "kernels": self._kernels,
            "late": (self._ended - began.at) * 1e3 - _between(began, self._marks[-1]),
        }  # fmt: skip

    def _run(self, schedule: Any, group: Any, local: Any, deadline: float) -> None:
        works: list[Any] = []

        def broadcast(*args: Any) -> Any:
            self._mark("copies")
            works.append(plain["broadcast"](*args))
            self._mark("calls")
            return works[-1]

        def settle(*args: Any) -> None:
            self._mark("copies")
            plain["settle"](*args)
            self._mark("wire")

        def last(name: str) -> Callable[..., None]:
            def ends(*args: Any) -> None:
                self._mark("copies")
                plain[name](*args)

            return ends

        # On a GPU all has been called by then; on the CPU, done.
        end = "until" if self._gpu else "forget"
        plain = {name: getattr(group, name) for name in ("broadcast", "settle", end)}
        self._marks = []
        self._mark("start")
        watched: dict[str, Any] = {"broadcast": broadcast, "settle": settle, end: last(end)}
        with mock.patch.multiple(group, **watched):
            wire.run(schedule, group, local, deadline)
        self._ended = time.perf_counter()
        self._kernels = sum(work._get_duration() for work in works) if self._gpu else 0.0

    def _mark(self, what: str) -> None:
        event = torch.cuda.Event(enable_timing=True) if self._gpu else None
        if event is not None:
            event.record()
        self._marks.append(_Mark(what, time.perf_counter(), event))


def _between(one: _Mark, other: _Mark) -> float:
    if one.event is not None and other.event is not None:
        return one.event.elapsed_time(other.event)
    return (other.at - one.at) * 1e3
