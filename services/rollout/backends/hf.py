"""The hf engine: any Hugging Face causal language model with plain attention; batch-invariant in float32.

One thread owns the model. Everything that touches it is queued there, so calls that overlap meet between two steps.
"""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.rollout.backend import EngineError, EngineFacts, Sample, SampleRequest
from services.rollout.backends.decoder import Decoder
from services.rollout.backends.parameters import Staged, stage, swap
from services.rollout.backends.slots import use_slot_attention
from services.rollout.backends.trial import try_out
from shared.config import RunConfig
from shared.training.errors import ModelError
from shared.training.models import load_policy
from shared.weights.codec import NOTHING, Kept
from shared.weights.join import LocalReceiver
from shared.weights.part import WirePart

P = ParamSpec("P")
T = TypeVar("T")

_LENGTH_MULTIPLE = 64


class _Call:
    """A `generate` call: where its samples go, and how many are still to come."""

    def __init__(self, rows: int) -> None:
        self.samples: asyncio.Queue[Sample | EngineError] = asyncio.Queue(rows + 1)
        self.missing = rows


class HfBackend:
    """See services/rollout/backend.py."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rollout-engine")
        self._model: PreTrainedModel | None = None
        self._decoder: Decoder | None = None
        self._prepared: tuple[int, Staged] | None = None
        self._calls: set[_Call] = set()
        self._driver: asyncio.Task[None] | None = None
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._commit = asyncio.Lock()

    @property
    def beats(self) -> int:
        return self._decoder.beats if self._decoder else 0

    async def configure(self, config: RunConfig, tokenizer: Any, prompt_tokens: int) -> EngineFacts:
        await self.release()
        return await self._compute(self._load, config, tokenizer, prompt_tokens)

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[Sample]:
        while not self._open.is_set():
            await self._open.wait()
        decoder, call = self._configured(), _Call(len(requests))
        if not requests:
            return
        self._calls.add(call)
        self._idle.clear()
        try:
            await self._compute(decoder.add, requests, call)
            if self._driver is None or self._driver.done():
                self._driver = asyncio.create_task(self._drive(decoder))
            for _ in requests:
                sample = await call.samples.get()
                if isinstance(sample, EngineError):
                    raise sample
                yield sample
        finally:
            if call in self._calls:
                self._leave(call)
                await self._compute(decoder.remove, call)

    async def receiver(self, part: WirePart, kept: Kept | None) -> LocalReceiver:
        self._configured()
        assert self._model is not None
        return LocalReceiver(part, self._model.device, kept or NOTHING)

    async def prepare_weights(self, version: int, tensors: Mapping[str, Tensor] | None) -> None:
        self._configured()
        assert self._model is not None
        assert tensors is not None
        self._prepared = (version, await asyncio.to_thread(stage, self._model, tensors))

    async def commit_weights(self, version: int) -> None:
        async with self._commit:
            if self._prepared is None or self._prepared[0] != version:
                held = "none" if self._prepared is None else f"version {self._prepared[0]}"
                raise EngineError(f"weight version {version} is not prepared here ({held} is)")
            self._open.clear()
            try:
                await self._idle.wait()
                await self._compute(self._swap)
            finally:
                self._open.set()

    async def abort(self) -> None:
        if self._decoder is not None:
            self._deliver(await self._compute(self._decoder.remove))

    async def health(self) -> str:
        if self._decoder is None:
            return "no model is loaded"
        try:
            logits_1V = await self._compute(self._decoder.probe, [0])
        except EngineError as error:
            return str(error)
        return "" if torch.isfinite(logits_1V).all() else "the model's logits are not finite"

    async def release(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait([self._driver])
        self._fail(set(self._calls), EngineError("the engine was released"))
        await self._compute(self._drop)

    async def _compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise EngineError(
                f"out of memory: lower rollout.slots, rollout.max_tokens or data.max_prompt_tokens ({error})"
            ) from error
        except (RuntimeError, ModelError) as error:
            raise error if isinstance(error, EngineError) else EngineError(f"{error}") from error

    async def _drive(self, decoder: Decoder) -> None:
        """Steps as long as a call misses samples."""
        while self._calls:
            try:
                self._deliver(await self._compute(decoder.step))
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
                # Not those that come meanwhile: their rows are queued behind the removal of these.
                failed = set(self._calls)
                await self._compute(decoder.remove)
                known = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
                self._fail(failed & self._calls, known)

    def _deliver(self, finished: list[tuple[Any, Sample]]) -> None:
        for call, sample in finished:
            call.samples.put_nowait(sample)
            call.missing -= 1
            if not call.missing:
                self._leave(call)

    def _fail(self, calls: set[_Call], error: EngineError) -> None:
        for call in calls:
            call.samples.put_nowait(error)
            self._leave(call)

    def _leave(self, call: _Call) -> None:
        self._calls.discard(call)
        if not self._calls:
            self._idle.set()

    def _configured(self) -> Decoder:
        if self._decoder is None:
            raise EngineError("the engine is not configured")
        return self._decoder

    def _load(self, config: RunConfig, tokenizer: Any, prompt_tokens: int) -> EngineFacts:
        try:
            model = load_policy(config.model).lm
        except ValueError as error:
            raise EngineError(str(error)) from error
        dtype = getattr(torch, config.model.dtype)
        model.to(dtype).requires_grad_(False)  # type: ignore[arg-type]
        wanted = prompt_tokens + config.rollout.max_tokens
        rounded = -(-wanted // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        length = min(rounded, getattr(model.config, "max_position_embeddings", rounded))
        use_slot_attention(model, length)
        decoder = Decoder(model, tokenizer, config.rollout.slots, length)
        invariant = try_out(decoder, dtype)
        self._model, self._decoder = model, decoder
        facts = {"device": str(model.device), "dtype": config.model.dtype, "slots": str(config.rollout.slots)}
        return EngineFacts("hf", length, invariant, facts)

    def _swap(self) -> None:
        assert self._model is not None
        assert self._decoder is not None
        assert self._prepared is not None
        version, staged = self._prepared
        swap(self._model, staged)
        self._decoder.forget()
        self._decoder.version, self._prepared = version, None

    def _drop(self) -> None:
        self._model = self._decoder = self._prepared = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
