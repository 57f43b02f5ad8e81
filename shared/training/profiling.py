"""PyTorch's profiler on demand: what each rank computes for one request, as a trace file and a few numbers.

It looks on: work, numbers and outcome are the same without it. What goes wrong with it is told, and that is all.
"""

import asyncio
import contextlib
import functools
import gzip
import os
import resource
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import structlog
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from shared.gen.sextet.v1 import common_pb2

from .group import Group
from .spans import Span, summarize

log = structlog.get_logger()
P = ParamSpec("P")
T = TypeVar("T")
NAME_CHARACTERS = 120
FAULT_CHARACTERS = 400


class Recorder:
    """Records one piece of work of this rank.

    Args:
        path: of the trace.

    Attributes:
        seen: what came of it.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._profiler: profile | None = None
        self.seen = common_pb2.RankProfile(rank=rank, fault="nothing was computed")

    def record(self, work: Callable[[], T]) -> T:
        """Does the work, in this thread. Raises what the work raises."""
        self.seen.fault = ""
        with self._told():
            self._profiler = _begin()
        began = time.perf_counter()
        try:
            result = work()
            self._finish(began)
        finally:
            with self._told():
                if self._profiler:
                    self._profiler.stop()
        return result

    def keep(self) -> None:
        """Writes the trace, and its numbers into `seen`. Takes longer than the work."""
        with self._told():
            if self._profiler and not self.seen.fault:
                self._summarize(self._profiler)
                _write(self._profiler, self._path)
                self.seen.path = str(self._path)
        self._profiler = None

    def _finish(self, began: float) -> None:
        with self._told():
            if (gpu := _gpu()) is not None:
                # What was only launched is part of the work.
                torch.cuda.synchronize(gpu)
                self.seen.memory_peak_gib = torch.cuda.max_memory_allocated(gpu) / 2**30
            else:
                self.seen.memory_peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            self.seen.seconds = time.perf_counter() - began

    def _summarize(self, profiler: profile) -> None:
        shares = summarize(_spans(profiler), self.seen.seconds)
        self.seen.communication_share, self.seen.compute_share = shares.communication, shares.compute
        for name, seconds, calls in shares.top:
            self.seen.top.add(name=name[:NAME_CHARACTERS], seconds=seconds, calls=calls)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever ails the profiler, the work is what counts
            self.seen.fault = self.seen.fault or f"{type(error).__name__}: {error}"[:FAULT_CHARACTERS]
            log.warning("not profiled", path=str(self._path), error=self.seen.fault)


RECORDER: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
"""Of the request that is being worked on, if it is to be recorded."""


class Ranked(Protocol):
    """Who does requests on every rank of a group."""

    group: Group


Servicer = TypeVar("Servicer", bound=Ranked)


def profiled(
    handler: Callable[[Servicer, Any], Awaitable[T]],
) -> Callable[[Servicer, Any], Awaitable[T]]:
    """A handler of requests with a field `profile`: where that is set, what `compute` does for it is recorded.

    The response of every rank then has the profiles of all.
    """

    @functools.wraps(handler)
    async def handle(self: Servicer, request: Any) -> T:
        if not request.HasField("profile"):
            return await handler(self, request)
        rank = self.group.rank
        recorder = Recorder(Path(f"{request.profile.prefix}-rank-{rank}.json.gz"), rank)
        token = RECORDER.set(recorder)
        try:
            response: Any = await handler(self, request)
        finally:
            RECORDER.reset(token)
        await asyncio.to_thread(recorder.keep)
        told = await asyncio.to_thread(self.group.gather, recorder.seen.SerializeToString())
        response.profile.extend(map(common_pb2.RankProfile.FromString, told))
        return response

    return handle


def recorded(function: Callable[P, T]) -> Callable[P, T]:
    """The function, recorded if the request that is being worked on asks for it."""
    recorder = RECORDER.get()
    if recorder is None:
        return function

    def record(*args: P.args, **kwargs: P.kwargs) -> T:
        return recorder.record(lambda: function(*args, **kwargs))

    return record


def _gpu() -> int | None:
    """The GPU that this process computes on."""
    if not torch.cuda.is_initialized():
        return None
    return max(range(torch.cuda.device_count()), key=torch.cuda.memory_allocated)


def _begin() -> profile:
    activities = [ProfilerActivity.CPU]
    if (gpu := _gpu()) is not None:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.reset_peak_memory_stats(gpu)
    profiler = profile(activities=activities)
    profiler.start()
    return profiler


def _spans(profiler: profile) -> list[Span]:
    """Events as they come from Kineto: PyTorch's `events()` takes fifteen times as long for the same."""
    spans = []
    for event in profiler.profiler.kineto_results.events():  # pyright: ignore[reportOptionalMemberAccess]
        on_device = event.device_type() != DeviceType.CPU
        # On a GPU, annotations lie over the kernels that they are about.
        if on_device and event.is_user_annotation():
            continue
        start = event.start_ns()
        end, thread = start + event.duration_ns(), event.start_thread_id()
        spans.append(Span(event.name(), start, end, thread, on_device, event.is_async()))
    return spans


def _write(profiler: profile, path: Path) -> None:
    """Writes the trace, completely or not at all."""
    if not path.is_absolute():
        raise ValueError(f"profile.prefix: {str(path)!r} is not absolute")
    path.parent.mkdir(parents=True, exist_ok=True)
    plain, part = path.with_name(f".{path.name}.json"), path.with_name(f".{path.name}.part")
    try:
        profiler.export_chrome_trace(str(plain))
        # PyTorch's own compression takes ten times as long for a quarter less.
        with plain.open("rb") as source, gzip.open(part, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.replace(part, path)
    finally:
        plain.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
