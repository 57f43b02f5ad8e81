"""A fake AsyncLLM that keeps vLLM's rules of sleeping and writes down what it did, and what it needs of vLLM."""

import asyncio
import sys
import types
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout.backends import vllm as backend
from services.rollout.backends.vllm import VllmBackend
from services.rollout.backends.vllm_sleep import CACHE, WEIGHTS

EOS = 2


class FakeLogprobs:
    """Of one place, as both of vLLM's kinds."""

    def __init__(self, token: int) -> None:
        self.start_indices, self.logprobs, self._token = [0], [-1.0], token

    def __getitem__(self, place: int) -> dict[int, Any]:
        return {self._token: SimpleNamespace(logprob=-1.0, rank=1)}


class FakeVllm:
    """Says the tokens 10, 11, 12 ... of a row, one at a time, and nothing while anything of it sleeps.

    Attributes:
        done: "sleep 1", the parts that it woke ("weights", "kv_cache"), "row" for one of a run's, "load" for a version.
        gate: rows wait for it before each token.
    """

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.done: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._rows = 0

    async def sleep(self, level: int) -> None:
        await asyncio.sleep(0)
        assert not self.asleep, "vLLM can't put to sleep what is half asleep"
        assert not self._rows, "rows are in progress"
        self.asleep = {WEIGHTS, CACHE}
        self.done.append(f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> None:
        await asyncio.sleep(0)
        assert self.asleep.issuperset(tags)
        self.asleep -= set(tags)
        self.done += tags

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        if not request_id.startswith("health"):
            self.done.append("row")
        self._rows += 1
        try:
            for left in reversed(range(params.max_tokens)):
                await self.gate.wait()
                await asyncio.sleep(0)
                assert not self.asleep, "an engine that sleeps makes no token"
                token = 10 + left % 50
                finish = None if left else "length"
                output = SimpleNamespace(token_ids=[token], logprobs=FakeLogprobs(token), finish_reason=finish)
                yield SimpleNamespace(outputs=[output])
        finally:
            self._rows -= 1

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "sextet_take":
            await asyncio.sleep(0)
            assert WEIGHTS not in self.asleep
            self.done.append("load")
        return ["v2"] if method == "sextet_setup" else [None]

    @property
    def engine_core(self) -> "FakeVllm":
        return self

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert not self._rows

    async def resume_generation(self) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        return True

    async def abort(self, names: list[str]) -> None: ...

    def shutdown(self) -> None: ...


def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    """What the next VllmBackend that is configured starts; `make_backend` of the service makes such."""
    engine = FakeVllm()
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.sampling_params": {
            "SamplingParams": SimpleNamespace,
            "RequestOutputKind": SimpleNamespace(DELTA="delta", FINAL_ONLY="delta"),
        },
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": type("EngineDeadError", (Exception,), {})},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(backend, "start_engine", lambda *_: engine)
    monkeypatch.setattr("services.rollout.__main__.make_backend", lambda _: VllmBackend())
    return engine
