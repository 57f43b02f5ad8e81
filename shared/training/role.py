"""What the services that hold a model share: settings, one run at a time, computing off the event loop."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Generic, ParamSpec, TypeVar

import torch
from pydantic import Field

from shared.batch import refs
from shared.batch.block import Block, Ragged
from shared.batch.columns import RESPONSE_MASK, RowKey
from shared.gen.sextet.v1 import batch_pb2
from shared.rpc.errors import (
    DamagedCheckpoint,
    FailedPrecondition,
    InvalidArgument,
    NotFinite,
    PartlyApplied,
    SextetError,
    VersionGap,
)
from shared.rpc.history import Applied
from shared.rpc.run import RoleContext
from shared.rpc.settings import ServiceSettings

from .device import free_memory, on_own_gpu
from .errors import CheckpointError, DamagedError, HalfStepError, ModelError, NonFiniteError
from .group import ALONE, Group
from .microbatch import TOKENS
from .profiling import recorded

P = ParamSpec("P")
T = TypeVar("T")
Held = TypeVar("Held")


class ModelSettings(ServiceSettings):
    """Settings of a service that computes with a model."""

    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of one operator; 0: one per core. Results are repeatable bit for bit with the same number."""
    read_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to fetch the rows of one batch."""
    world_size: Annotated[int, Field(gt=0)] = 1
    """Ranks (processes) of this replica, one per GPU; the run's `parallel` says how they divide the work."""
    rank_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds without a sign of life from a rank after which all ranks end."""


class BatchPort:
    """How a servicer gets the rows that a request names, and hands out the ones it made."""

    def __init__(self, context: RoleContext[Any], group: Group = ALONE) -> None:
        self._reader, self._store, self._group = context.reader, context.store, group
        self._timeout = context.settings.read_timeout

    async def read(self, inputs: batch_pb2.BatchRef, required: Sequence[str], optional: Sequence[str] = ()) -> Block:
        """The required columns, and those of the optional ones that the batch has (`name*`: all that begin so)."""
        there = [name for name in refs.column_names(inputs) if any(fnmatchcase(name, wanted) for wanted in optional)]
        return await self._reader.read(inputs, [*required, *there], timeout=self._timeout)

    async def share(
        self,
        inputs: batch_pb2.BatchRef,
        required: Sequence[str],
        plan: Callable[[Block], Sequence[RowKey]],
        overall: Sequence[str] = (),
    ) -> tuple[Block, Block | None]:
        """The rows that this rank computes, and an outline of all rows; alone: all rows, and None.

        Args:
            plan: which rows of an outline this rank computes.
            overall: columns of which rank 0 needs all rows.

        Returns:
            The outline has `response_mask`, `tokens` and, on rank 0, the overall columns.

        Raises:
            SextetError: on all ranks the same, though only one of them could not read.
        """
        if self._group.size == 1:
            return await self.read(inputs, required), None
        outline, mine, failure = None, None, None
        try:
            names = [RESPONSE_MASK, *(overall if self._group.rank == 0 else ())]
            masks = await self.read(inputs, names)
            counts = refs.row_tokens(inputs)
            lengths = Ragged.from_scalars([counts[key] for key in masks.rows], "int32")
            outline = Block(masks.rows, {**masks.columns, TOKENS: lengths})
            rows = plan(outline)
            empty = Block((), {})
            mine = await self._reader.read(inputs, required, rows=rows, timeout=self._timeout) if rows else empty
        except (SextetError, ValueError) as error:
            failure = error if isinstance(error, SextetError) else InvalidArgument(str(error))
        told = None if failure is None else [type(failure).__name__, str(failure), failure.details]
        for rank, said in enumerate(await asyncio.to_thread(self._group.exchange, told)):
            if said is not None:
                raise SextetError.kinds[said[0]](f"{said[1]} (rank {rank})", **said[2])
        assert outline is not None
        assert mine is not None
        return mine, outline

    def put(self, block: Block, request: Any) -> batch_pb2.BlockRef:
        """Keeps a block made from the request's rows until its step is released; rank 0 does."""
        if self._group.rank:
            return batch_pb2.BlockRef()
        operation, tokens = request.operation.id, refs.row_tokens(request.inputs)
        counts = [tokens[key] for key in block.rows]
        return self._store.put(block, run=operation.run, step=operation.step, tokens=counts)


class RunHolder(Generic[Held]):
    """Holds what one run needs (models, optimizer), from its configuration to its release."""

    def __init__(self) -> None:
        self._run = ""
        self._held: Held | None = None
        self._broken = ""

    def hold(self, run: str, held: Held) -> None:
        """Takes a run's state in place of what was held."""
        self._run, self._held = run, held

    @contextlib.contextmanager
    def changing(self, run: str) -> Iterator[Held]:
        """The run's state, to be changed: a change that stops half-way leaves a fault until the next `hold`."""
        try:
            yield self.of(run)
        except PartlyApplied as error:
            self._broken = str(error)
            raise

    def drop(self) -> None:
        """Lets go of everything and gives its memory back."""
        self._run, self._held, self._broken = "", None, ""
        free_memory()

    def of(self, run: str) -> Held:
        """The run's state.

        Raises:
            FailedPrecondition: another run is configured here, or none, or its state is half changed.
        """
        if self._broken:
            raise FailedPrecondition(f"this service must be configured again: {self._broken}", run=run)
        if self._held is None or run != self._run:
            here = f"is configured for run {self._run!r}" if self._run else "is not configured"
            raise FailedPrecondition(f"this service {here}, not for run {run!r}: configure it first", run=run)
        return self._held

    def any(self) -> Held:
        """Whatever is held. Raises FailedPrecondition when nothing is."""
        return self.of(self._run)

    @property
    def current(self) -> Held | None:
        """Whatever is held, if anything."""
        return self._held

    @property
    def fault(self) -> str:
        """Why the state can't be used; empty when it can."""
        return self._broken

    def holds(self, run: str) -> bool:
        """That run is configured here."""
        return self._held is not None and run == self._run


async def compute(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs blocking work in a thread; what can go wrong in training becomes an error that crosses the wire.

    Raises:
        InvalidArgument: a batch or configuration that cannot be computed with.
        DamagedCheckpoint: a checkpoint that another one may do for.
        FailedPrecondition: a model, the place of a checkpoint, or memory that does not allow it.
        NotFinite: a loss or a gradient.
        PartlyApplied: state was left half changed; only a checkpoint helps.
    """
    try:
        return await asyncio.to_thread(recorded(on_own_gpu(function)), *args, **kwargs)
    except SextetError:
        raise
    except NonFiniteError as error:
        raise NotFinite(str(error)) from error
    except DamagedError as error:
        raise DamagedCheckpoint(str(error)) from error
    except (ModelError, CheckpointError) as error:
        raise FailedPrecondition(str(error)) from error
    except HalfStepError as error:
        raise PartlyApplied(str(error)) from error
    except MemoryError as error:
        raise FailedPrecondition(f"out of memory: {error}") from error
    except torch.OutOfMemoryError as error:
        advice = "lower micro_batch_size, or set gradient_checkpointing"
        raise FailedPrecondition(f"out of memory: {advice}: {str(error).splitlines()[0]}") from error
    except ValueError as error:
        raise InvalidArgument(str(error)) from error


async def by_rank(group: Group, work: Awaitable[T]) -> tuple[T, dict[str, float]]:
    """What the work results in, and the seconds that it took the slowest and the fastest of several ranks.

    Without those in which a rank waited for what the others tell it; waits in collectives of tensors are in it.
    """
    began, waited = time.perf_counter(), group.waited
    result = await work
    own = time.perf_counter() - began - (group.waited - waited)
    if group.size == 1:
        return result, {}
    told = await asyncio.to_thread(group.exchange, own)
    return result, {"rank_seconds_max": max(told), "rank_seconds_min": min(told)}


def refuse_gap(request: Any, version: int) -> None:
    """Raises VersionGap when an update is meant for weights of another optimizer step than the role is at."""
    if request.HasField("base_version") and request.base_version != version:
        raise VersionGap(
            f"this update is for version {request.base_version}, and this role is at {version}",
            base_version=str(request.base_version),
            version=str(version),
        )


def operation_fields(applied: Applied | None) -> dict[str, Any] | None:
    """The last change of state as JSON values, for a checkpoint of that state."""
    return applied.fields() if applied else None
