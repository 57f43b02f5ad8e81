"""The decode loop: B slots advance together, a finished row's slot goes to the next row that waits.

The shapes are always the same: one prompt at its exact length, or B rows over L positions. Whatever shares the slots,
in whatever order it came, a row goes through the same operations of the same shapes (law 7).
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from services.rollout.backend import EngineError, Finish, Likely, Sample, SampleRequest
from services.rollout.backends.sampler import Draw, draw, likely
from services.rollout.backends.slots import SlotCache
from services.rollout.text import StopWatch


@dataclass(eq=False)
class Row:
    """A row in progress: what was asked, and what was sampled so far."""

    request: SampleRequest
    owner: object
    limit: int
    watch: StopWatch
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    likely: list[Likely] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the last token stands in the context."""
        return len(self.request.prompt_ids) + len(self.response_ids) - 1

    def draw(self) -> Draw:
        return Draw(self.request.params, self.request.seed, len(self.response_ids))

    def sample(self, finish: Finish) -> Sample:
        asked = self.request
        content = (tuple(self.response_ids), tuple(self.logprobs), tuple(self.versions))
        return Sample(asked.uid, asked.sample, asked.prompt_ids, *content, finish, tuple(self.likely))


@dataclass(frozen=True)
class _Prefilled:
    keys_values: list[tuple[Tensor, Tensor]]
    logits_1V: Tensor


Finished = list[tuple[object, Sample]]


class Decoder:
    """Rows in, samples out. Not thread-safe: one caller at a time.

    Args:
        model: attends through slot_attention.
        tokenizer: finds stop strings.
        slots: B, rows decoded together.
        length: L, positions of a slot.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, slots: int, length: int) -> None:
        self._model, self._tokenizer, self._length = model, tokenizer, length
        self._cache = SlotCache(model.config.num_hidden_layers, slots, length, model.device)
        self._slots: list[Row | None] = [None] * slots
        self._waiting: deque[Row] = deque()
        # The samples of a prompt share its prefill; so many are kept, in case their order is mixed.
        self._prefilled: OrderedDict[tuple[int, ...], _Prefilled] = OrderedDict()
        self.version = self.beats = 0

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def vocabulary(self) -> int:
        return self._model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(self._slots)

    def add(self, requests: Iterable[SampleRequest], owner: object) -> None:
        """Queues rows.

        Raises:
            EngineError: a prompt is empty or leaves no room for a token; then none is queued.
        """
        self._waiting.extend([self._row(request, owner) for request in requests])

    def remove(self, owner: object | None = None) -> Finished:
        """Takes out an owner's rows (None: all) and answers them as far as they are."""
        gone = [row for row in (*self._slots, *self._waiting) if row and (owner is None or row.owner is owner)]
        self._slots = [None if row in gone else row for row in self._slots]
        self._waiting = deque(row for row in self._waiting if row not in gone)
        return [(row.owner, row.sample("aborted")) for row in gone]

    @torch.inference_mode()
    def step(self) -> Finished:
        """One token for every row in a slot, after free slots were filled. Answers the rows that are done."""
        finished: Finished = []
        self._fill(finished)
        if any(self._slots):
            self._advance(finished)
        return finished

    @torch.inference_mode()
    def forget(self) -> None:
        """Drops everything computed with the present weights. No row may be in progress."""
        assert not self.busy
        self._prefilled.clear()
        self._cache.clear()

    @torch.inference_mode()
    def probe(self, ids: Sequence[int]) -> Tensor:
        """Logits [1, V] after these tokens, through the whole model; nothing in progress is touched."""
        return self._compute_prefill(ids).logits_1V

    @torch.inference_mode()
    def trial(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, V] after each slot's tokens, the last one decoded in the slots. No row may be in progress."""
        assert not self.busy
        for slot, ids in enumerate(rows):
            self._cache.place(slot, self._prefill(tuple(ids[:-1])).keys_values)
        return self._forward([ids[-1] for ids in rows], [len(ids) - 1 for ids in rows])

    def _row(self, request: SampleRequest, owner: object) -> Row:
        prompt = len(request.prompt_ids)
        if not prompt:
            raise EngineError(f"prompt {request.uid} is empty")
        if prompt >= self._length:
            raise EngineError(
                f"prompt {request.uid} has {prompt} tokens: no room for a response in {self._length} positions; "
                "raise data.max_prompt_tokens or rollout.max_tokens, as far as the model's context goes"
            )
        limit = min(request.params.max_tokens, self._length - prompt)
        earlier = request.partial
        if earlier is None:
            return Row(request, owner, limit, StopWatch(self._tokenizer, request.params))
        watch = StopWatch(self._tokenizer, request.params, earlier.response_ids)
        content = (list(earlier.response_ids), list(earlier.logprobs), list(earlier.versions), list(earlier.likely))
        return Row(request, owner, limit, watch, *content)

    def _fill(self, finished: Finished) -> None:
        for slot, held in enumerate(self._slots):
            while held is None and self._waiting:
                row = self._waiting.popleft()
                ids = (*row.request.prompt_ids, *row.response_ids)
                prefilled = self._prefill(ids)
                if self._take(row, prefilled.logits_1V, draw(prefilled.logits_1V, [row.draw()]), 0, finished):
                    continue
                self._cache.place(slot, prefilled.keys_values)
                self._slots[slot] = held = row

    def _advance(self, finished: Finished) -> None:
        tokens = [row.response_ids[-1] if row else 0 for row in self._slots]
        logits_BV = self._forward(tokens, [row.position if row else 0 for row in self._slots])
        drawn = draw(logits_BV, [row.draw() if row else None for row in self._slots])
        for slot, row in enumerate(self._slots):
            if row and self._take(row, logits_BV, drawn, slot, finished):
                self._slots[slot] = None

    def _forward(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        device = self._model.device
        output = self._model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            attention_mask=self._cache.at(positions, self._model.dtype),
            position_ids=torch.tensor(positions, device=device)[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self.beats += 1
        return output.logits[:, -1]

    def _take(
        self,
        row: Row,
        logits_NV: Tensor,
        drawn: tuple[list[int], list[float], list[bool]],
        index: int,
        finished: Finished,
    ) -> bool:
        """Appends the row's drawn token; True when the row is done with it."""
        tokens, logprobs, finite = drawn
        if not finite[index]:
            raise EngineError(f"weight version {self.version} gives no finite distribution (row {row.request.uid})")
        row.response_ids.append(tokens[index])
        row.logprobs.append(logprobs[index])
        row.versions.append(self.version)
        if row.request.params.likely:
            row.likely.append(likely(logits_NV[index], row.request.params))
        stopped = row.watch.push(tokens[index])
        if stopped or len(row.response_ids) >= row.limit:
            finished.append((row.owner, row.sample("stop" if stopped else "length")))
            return True
        return False

    def _prefill(self, ids: tuple[int, ...]) -> _Prefilled:
        if ids not in self._prefilled:
            while len(self._prefilled) >= len(self._slots):
                self._prefilled.popitem(last=False)
            self._prefilled[ids] = self._compute_prefill(ids)
        self._prefilled.move_to_end(ids)
        return self._prefilled[ids]

    def _compute_prefill(self, ids: Sequence[int]) -> _Prefilled:
        cache = DynamicCache()
        device = self._model.device
        output = self._model(
            input_ids=torch.tensor([list(ids)], device=device),
            position_ids=torch.arange(len(ids), device=device)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.beats += 1
        keys_values = [(layer.keys[0], layer.values[0]) for layer in cache.layers]  # type: ignore[index]
        return _Prefilled(keys_values, output.logits[:, -1])
