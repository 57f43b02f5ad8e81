"""The rollout role's state: the configured run's prompts, its engine, and the weight versions it holds."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import prometheus_client
import structlog

from services.rollout.backend import EngineError, EngineFacts, GenerationBackend, Sample, SampleRequest, SamplingParams
from services.rollout.conversations import Conversations
from services.rollout.health import EngineWatch
from services.rollout.kept import KeptSamples, Place
from services.rollout.making import Making
from services.rollout.prompts import RunPrompts, load_prompts
from services.rollout.samples import (
    Generated,
    block_of,
    cut_of,
    limited,
    metrics_of,
    oldest_of,
    samples_of,
    token_counts,
    told_apart,
)
from services.rollout.tasks import Tasks
from services.rollout.weights import Weights
from shared.batch import columns
from shared.batch.block import Block
from shared.batch.columns import RowKey
from shared.config import RolloutConfig, RunConfig
from shared.data.datasets import DataError, PromptExample
from shared.failpoints import hit_async
from shared.gen.sextet.v1 import rollout_pb2
from shared.rpc.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable, Unimplemented
from shared.rpc.role import Configured, StagedState
from shared.seeds import derive_seed
from shared.training.errors import ModelError

TOKENS = prometheus_client.Counter("sextet_rollout_tokens_total", "Tokens of prompts and responses.", ["part"])
MAX_ROWS = 65_536
"""In progress at once."""

SAMPLES = prometheus_client.Counter("sextet_rollout_samples_total", "Finished samples.", ["finish"])

log = structlog.get_logger()


@dataclass(frozen=True)
class _Run:
    """What is loaded for a run."""

    run: str
    config: RunConfig
    prompts: RunPrompts
    facts: EngineFacts

    def params(self, greedy: bool) -> SamplingParams:
        asked: RolloutConfig = self.config.rollout
        return SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            max_tokens=asked.max_tokens,
            min_tokens=asked.min_tokens,
            stop=asked.stop,
            stop_token_ids=tuple(sorted({*self.prompts.end_ids, *asked.stop_token_ids})),
            greedy=greedy,
        )


@dataclass(frozen=True)
class Serving:
    """What the OpenAI endpoint samples from.

    Attributes:
        end_ids: tokens that end a response.
        context: prompt and response tokens of a row together.
        version: of the committed weights.
    """

    run: str
    config: RunConfig
    tokenizer: Any
    end_ids: tuple[int, ...]
    context: int
    version: int
    backend: GenerationBackend
    watch: EngineWatch


class RolloutRole:
    """Loads runs, generates, takes weights. What changes weights runs on the engine's lane; `generate` overlaps.

    Args:
        make_backend: makes the engine that `rollout.engine` names.
        weights: fetches, holds and serves weight versions.
        kept: finished samples that outlive this process.
        probe_deadline: see EngineWatch.
    """

    def __init__(
        self,
        make_backend: Callable[[str], GenerationBackend],
        weights: Weights,
        kept: KeptSamples,
        probe_deadline: float = 9.0,
    ) -> None:
        self._make_backend, self._weights, self.kept = make_backend, weights, kept
        self.tasks = Tasks()
        self._conversations = Conversations(self.tasks, kept)
        self._backend: GenerationBackend | None = None
        self._loaded: _Run | None = None
        self._rows = self._prepared_bytes = 0
        self._fault = ""
        self.watch = EngineWatch(self._probe, lambda: self._backend.beats if self._backend else 0, probe_deadline)

    async def configure(self, config: RunConfig, run: str, checkpoint: str | None) -> Configured:
        # Loading makes an engine silent for good reasons, and has deadlines of its own.
        with self.watch.excused():
            return await self._configure(config, run)

    async def _configure(self, config: RunConfig, run: str) -> Configured:
        await self.release(self._loaded.run if self._loaded else run)
        try:
            prompts = await asyncio.to_thread(load_prompts, config)
            self._backend = self._make_backend(config.rollout.engine)
            # Conversations over the endpoint may be longer than the dataset's rows.
            room = max(prompts.longest, (config.rollout.context or 0) - config.rollout.max_tokens)
            facts = await self._backend.configure(config, prompts.tokenizer, room)
        except (DataError, ModelError, EngineError) as error:
            await self.release(run)
            raise FailedPrecondition(str(error)) from error
        await asyncio.to_thread(self.kept.start, run, config)
        self._loaded = _Run(run, config, prompts, facts)
        keeps = config.weights.only_changed or config.actor.lora is not None
        self._weights.start(run, keeps)
        # Agents may say something else when they are asked again.
        repeats = facts.batch_invariant and not config.rollout.agents
        about = {"engine": facts.engine, "context": str(facts.context), "batch_invariant": str(repeats)}
        return Configured(0, {**prompts.facts(), **facts.facts, **{key: value.lower() for key, value in about.items()}})

    async def generate(self, request: rollout_pb2.GenerateRequest, earlier: Block | None = None) -> Generated:
        """Rows of the request, in its order.

        Args:
            earlier: rows of it to go on with, columns EARLIER.

        Raises:
            FailedPrecondition: another run is loaded, no verified weights are held, or the engine fails.
            ResourceExhausted: too many rows are in progress.
            InvalidArgument: a row is not of the dataset, or asked for twice.
        """
        loaded, backend = self._of(request.operation.id.run)
        params = loaded.params(request.greedy)
        wanted, examples = await asyncio.to_thread(_requests, loaded, request, params, earlier)
        started = time.monotonic()
        place = Place(request.operation.id.step, self.version(), request.greedy)
        if loaded.config.rollout.agents:
            rows = list(zip(wanted, examples, strict=True))
            return await self._converse(loaded, backend, request, place, rows)
        keys = [RowKey(row.uid, row.sample) for row in wanted]
        about = dict(zip(keys, examples, strict=True))
        make = partial(block_of, examples=about, tokenizer=loaded.prompts.tokenizer, params=params)
        found = await self.kept.find(place, wanted, request)
        done = {RowKey(sample.uid, sample.sample) for sample in found}
        left = [row for key, row in zip(keys, wanted, strict=True) if key not in done]
        making = Making(make, _nothing if request.validation else partial(self.kept.keep_finished, place), found)
        with self._queued(len(wanted)):
            async with contextlib.aclosing(self._sample(backend, left)) as samples:
                async for sample in samples:
                    await making.add(told_apart(sample, params, loaded.facts.context))
                    await hit_async("rollout.sample")
        block = await making.block(keys)
        before = sum(len(row.partial.response_ids) for row in wanted if row.partial)
        metrics = metrics_of(block, before, time.monotonic() - started)
        made = Generated(block, token_counts(block), metrics, oldest_of(block, self.version()), cut_of(block))
        _count(made)
        return made

    async def _sample(self, backend: GenerationBackend, rows: Sequence[SampleRequest]) -> AsyncGenerator[Sample]:
        try:
            async with backend.turn():
                async for sample in backend.generate(rows):
                    yield sample
        except EngineError as error:
            fault = await backend.health()
            # An engine that was released meanwhile says nothing about the one that took its place.
            if backend is self._backend:
                self._fault = fault
            raise FailedPrecondition(str(error)) from error

    async def _converse(
        self,
        loaded: _Run,
        backend: GenerationBackend,
        request: rollout_pb2.GenerateRequest,
        place: Place,
        rows: list[tuple[SampleRequest, PromptExample]],
    ) -> Generated:
        tokenizer, patience = loaded.prompts.tokenizer, loaded.config.rollout.agent_timeout
        with self._queued(len(rows)):
            try:
                async with backend.turn():
                    made = await self._conversations.generate(request, place, rows, tokenizer, patience)
            except EngineError as error:
                raise FailedPrecondition(str(error)) from error
        _count(made)
        return made

    @contextlib.contextmanager
    def _queued(self, rows: int) -> Iterator[None]:
        """Counts rows in progress; a call is always taken when there are none."""
        if self._rows and self._rows + rows > MAX_ROWS:
            raise ResourceExhausted(f"{self._rows} rows are in progress: {rows} more would be over {MAX_ROWS}")
        self._rows += rows
        try:
            yield
        finally:
            self._rows -= rows

    async def prepare(self, request: rollout_pb2.PrepareWeightsRequest) -> rollout_pb2.PrepareWeightsResponse:
        """Fetches and verifies a version beside the serving one. Raises as Weights.prepare."""
        _, backend = self._of(request.operation.id.run)
        self._prepared_bytes = request.weights.bytes
        return await self._weights.prepare(request.weights, backend, request.gathering)

    async def commit(self, request: rollout_pb2.CommitWeightsRequest) -> rollout_pb2.CommitWeightsResponse:
        """Serves the prepared version.

        Raises:
            FailedPrecondition: the engine died of it, or as Weights.commit.
        """
        _, backend = self._of(request.operation.id.run)
        await hit_async("rollout.commit")
        with self.watch.excused(self.watch.for_weights(self._prepared_bytes)):
            work = self._weights.commit(request.version, request.digest, backend)
            await self.watch.unless_dead(work)
        self._fault = ""
        return rollout_pb2.CommitWeightsResponse(version=request.version)

    async def stage(self) -> StagedState:
        raise Unimplemented("the rollout role has no state of its own: its weights are the actor's")

    async def release(self, run: str) -> None:
        self._weights.stop()
        backend, self._backend, self._loaded, self._fault = self._backend, None, None, ""
        if backend is not None:
            await backend.release()

    def version(self) -> int:
        return self._weights.version

    def fault(self) -> str:
        return self._fault or self.watch.fault

    def serving(self) -> Serving:
        """Raises Unavailable: no run is loaded, or the engine has a fault."""
        if self._loaded is None or self._backend is None or self.version() < 0:
            raise Unavailable("no run is loaded: this replica holds no policy to sample from")
        if fault := self.fault():
            raise Unavailable(fault)
        loaded = self._loaded
        prompts, context = loaded.prompts, loaded.facts.context
        return Serving(
            loaded.run,
            loaded.config,
            prompts.tokenizer,
            prompts.end_ids,
            context,
            self.version(),
            self._backend,
            self.watch,
        )

    async def _probe(self) -> str | None:
        if self._backend is None or self._loaded is None:
            return None
        backend, answer = self._backend, await self._backend.health()
        if backend is not self._backend:
            return None
        if not answer:
            # What ended a call was a moment's: the memory of a GPU, say.
            self._fault = ""
        return answer

    def _of(self, run: str) -> tuple[_Run, GenerationBackend]:
        if self._loaded is None or self._backend is None or self._loaded.run != run:
            here = f"is configured for run {self._loaded.run!r}" if self._loaded else "is not configured"
            raise FailedPrecondition(
                f"this rollout {here} and holds no verified weights of run {run!r}: configure it first", run=run
            )
        return self._loaded, self._backend


def _requests(
    loaded: _Run, request: rollout_pb2.GenerateRequest, params: SamplingParams, earlier: Block | None
) -> tuple[list[SampleRequest], list[PromptExample]]:
    rows, examples = [], []
    partial = samples_of(earlier) if earlier else {}
    try:
        prompts = loaded.prompts.of(request.validation)
        for prompt in request.prompts:
            ids, example = tuple(prompts.ids(prompt.index)), prompts.example(prompt.index)
            for sample in prompt.samples:
                step = prompt.step or request.operation.id.step
                seed = derive_seed(loaded.config.seed, step, prompt.uid, sample, "sample")
                row = SampleRequest(prompt.uid, sample, ids, seed, params, partial.get(RowKey(prompt.uid, sample)))
                rows.append(limited(row, request.budget) if request.budget else row)
                examples.append(example)
    except (IndexError, DataError) as error:
        raise InvalidArgument(str(error)) from None
    if not rows:
        raise InvalidArgument("prompts is empty, or asks for no samples")
    if len({(row.uid, row.sample) for row in rows}) < len(rows):
        raise InvalidArgument("prompts asks for a row twice: uid and sample must name one row")
    return rows, examples


def _nothing(block: Block) -> None:
    """What is kept of a validation."""


def _count(made: Generated) -> None:
    for part in ("prompt", "response"):
        TOKENS.labels(part).inc(made.metrics[f"{part}_tokens"])
    for finish, count in Counter(made.block[columns.FINISH].texts()).items():
        SAMPLES.labels(finish).inc(count)
