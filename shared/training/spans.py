"""What a profiler has seen as a few numbers: how much of the time was communication and computing, and in what."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

TOP = 8


class Span(NamedTuple):
    """Something that took time on a thread, or on a device; times in nanoseconds, on one clock.

    Attributes:
        on_device: a kernel or a copy of a GPU.
        is_async: it may end on another thread, and its thread goes on meanwhile.
    """

    name: str
    start: int
    end: int
    thread: int = 0
    on_device: bool = False
    is_async: bool = False


class Top(NamedTuple):
    """Own seconds and calls of an operator or kernel."""

    name: str
    seconds: float
    calls: int


class Shares(NamedTuple):
    """Parts of the profiled time, 0 to 1 each. They overlap where a GPU computes while it communicates.

    Attributes:
        communication: in which a collective was under way: NCCL's kernels, gloo's operations.
        compute: in which other kernels ran; on a CPU, in which PyTorch's operators computed, over all threads.
        top: kernels where there are any, else operators; with the collectives.
    """

    communication: float
    compute: float
    top: list[Top]


def summarize(spans: Sequence[Span], seconds: float) -> Shares:
    """The shares of `seconds` of wall time, and the most expensive operators."""
    collectives = [span for span in spans if is_collective(span)]
    kernels = [span for span in spans if span.on_device]
    if kernels:
        spent = [(span.name, span.end - span.start) for span in spans if span.on_device or is_collective(span)]
        computing = covered(span for span in kernels if not is_collective(span) and not _is_copy(span))
    else:
        own = [(name, time) for name, time in own_times(spans) if name.startswith("aten::")]
        spent = own + [(span.name, span.end - span.start) for span in collectives]
        computing = sum(time for _, time in own)
    whole = seconds * 1e9
    return Shares(covered(collectives) / whole, computing / whole, _top(spent))


def is_collective(span: Span) -> bool:
    """Ranks exchange something. PyTorch's own operators (c10d::) only begin it."""
    return "nccl" in span.name.lower() if span.on_device else span.is_async and span.name.startswith("gloo:")


def _is_copy(span: Span) -> bool:
    return span.name.startswith(("Memcpy", "Memset"))


def covered(spans: Iterable[Span]) -> int:
    """Nanoseconds in which at least one of the spans is under way."""
    total, reached = 0, 0
    for start, end in sorted((span.start, span.end) for span in spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def own_times(spans: Iterable[Span]) -> list[tuple[str, int]]:
    """Name and nanoseconds of each operator on a thread, without what the operators took that it called."""
    threads: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if not (span.is_async or span.on_device):
            threads[span.thread].append(span)
    return [timed for each in threads.values() for timed in _own_times(each)]


def _own_times(spans: list[Span]) -> list[tuple[str, int]]:
    times: list[int] = []
    # Callers of the present span, outermost first; the longer of two that begin together is the caller.
    callers: list[int] = []
    spans = sorted(spans, key=lambda span: (span.start, -span.end))
    for place, span in enumerate(spans):
        while callers and spans[callers[-1]].end <= span.start:
            callers.pop()
        if callers:
            times[callers[-1]] -= span.end - span.start
        times.append(span.end - span.start)
        callers.append(place)
    return [(span.name, time) for span, time in zip(spans, times, strict=True)]


def _top(spent: Iterable[tuple[str, int]]) -> list[Top]:
    sums: dict[str, list[int]] = defaultdict(list)
    for name, time in spent:
        sums[name].append(time)
    tops = [Top(name, sum(times) / 1e9, len(times)) for name, times in sums.items()]
    return sorted(tops, key=lambda top: (-top.seconds, top.name))[:TOP]
