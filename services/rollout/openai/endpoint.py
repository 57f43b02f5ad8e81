"""The endpoint's work: from a request to rows of the engine, and from rows to an answer."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.rollout.backend import LEAST_TEMPERATURE, Sample, SamplingParams
from services.rollout.openai.answers import TextStream, chat_logprobs, completion_logprobs, usage, version_spans
from services.rollout.openai.generation import grow
from services.rollout.openai.protocol import POLICY, ApiError, ChatBody, CompletionBody, Sampling
from services.rollout.openai.sessions import Session, said_by
from services.rollout.role import RolloutRole, Serving
from services.rollout.text import response_text
from shared.data.datasets import DataError
from shared.data.prompts import prompt_ids, prompt_text
from shared.openai import error_body
from shared.rpc.errors import SextetError
from shared.seeds import derive_seed

MAX_PROMPTS = 256
MAX_STOP_IDS = 128
"""Of a row, as many as vLLM's second model runner has room for: with more its engine dies."""


@dataclass
class Job:
    """A request on its way: rows of one or several prompts, and how its answers look.

    Attributes:
        kind: the `object` of an answer, "chat.completion" or "text_completion".
        session, parent, text: of a session's turn.
        last: the rows as they are, by choice.
    """

    serving: Serving
    body: Sampling
    kind: str
    prompts: list[list[int]]
    params: SamplingParams
    session: Session | None = None
    parent: int | None = None
    text: str = ""
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    last: dict[int, Sample] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        return self.kind == "chat.completion"

    async def grow(self) -> AsyncIterator[tuple[int, Sample, bool]]:
        """(choice, row so far, done), until all choices are done."""
        with self.session.turn() if self.session else contextlib.nullcontext():
            async for grown in grow(self.serving, self.id, self._rows(), self.params):
                self.last[grown.place] = grown.sample
                yield grown.place, grown.sample, grown.done
            if self.session is not None:
                assert isinstance(self.body, ChatBody)
                said = said_by(self.serving.tokenizer, self.last[0], self.params)
                self.session.add(self.parent, self.body.plain(), self.text, self.last[0], said)

    def _rows(self) -> list[tuple[list[int], int]]:
        """Prompt and seed of every choice. Without a seed of the caller's: the task's, else the request's own id's."""
        asked = self.body.seed
        base, mark = (self.serving.config.seed, self.id) if asked is None else (asked, "")
        if asked is None and self.session and self.session.task:
            base, mark = self.session.task.seed, f"turn {self.session.begun}"
        return [
            (ids, derive_seed(base, 0, f"{mark}/{number}", k, "openai"))
            for number, ids in enumerate(self.prompts)
            for k in range(self.body.n)
        ]

    async def finish(self) -> None:
        """Grows all choices to their end."""
        async for _ in self.grow():
            pass

    def answer(self) -> dict[str, Any]:
        """The whole answer, once all rows are done."""
        choices = [self._choice(choice, sample) for choice, sample in sorted(self.last.items())]
        return {**self._head(self.kind), "choices": choices, "usage": usage(self.prompts, list(self.last.values()))}

    def _choice(self, choice: int, sample: Sample) -> dict[str, Any]:
        text = response_text(self.serving.tokenizer, sample, self.params)
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        return {"index": choice, **content, "finish_reason": sample.finish, **self._extras(sample, sample, 0)}

    def _extras(self, sample: Sample, tail: Sample, offset: int) -> dict[str, Any]:
        tokenizer = self.serving.tokenizer
        extras: dict[str, Any] = {"weight_versions": version_spans(tail.versions), "logprobs": None}
        if isinstance(self.body, ChatBody) and self.body.logprobs:
            extras["logprobs"] = chat_logprobs(tokenizer, tail)
        if isinstance(self.body, CompletionBody) and self.body.logprobs is not None:
            extras["logprobs"] = completion_logprobs(tokenizer, tail, offset)
        if self.body.return_token_ids:
            extras |= {"token_ids": list(tail.response_ids), "prompt_token_ids": list(sample.prompt_ids)}
        return extras

    def _head(self, kind: str) -> dict[str, Any]:
        serving = self.serving
        version = max((sample.versions[-1] for sample in self.last.values() if sample.versions), default=None)
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": POLICY,
            "weight_version": version,
            "system_fingerprint": f"{serving.run}@{version}",
        }

    async def events(self) -> AsyncIterator[str]:
        """The answer as Server-Sent Events."""
        tokenizer, streams, said = self.serving.tokenizer, {}, {}
        try:
            async for choice, sample, done in self.grow():
                first = choice not in streams
                stream = streams.setdefault(choice, TextStream(tokenizer, self.params))
                text, tail = stream.push(sample, done)
                content = {"text": text}
                if self.chat:
                    content = {"delta": {**({"role": "assistant"} if first else {}), "content": text}}
                finish = sample.finish if done else None
                extras = self._extras(sample, tail, said.get(choice, 0))
                said[choice] = said.get(choice, 0) + len(text)
                yield self._event([{"index": choice, **content, "finish_reason": finish, **extras}])
            if self.body.stream_options and self.body.stream_options.include_usage:
                yield self._event([], usage=usage(self.prompts, list(self.last.values())))
        except SextetError as error:
            # The status line is gone already: clients look for an error among the events.
            yield f"data: {json.dumps(error_body(str(error), 503, code=error.code.name.lower()))}\n\n"
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = f"{self.kind}.chunk" if self.chat else self.kind
        return f"data: {json.dumps({**self._head(kind), 'choices': choices, **more})}\n\n"


async def completion_job(role: RolloutRole, body: CompletionBody) -> Job:
    """Raises ApiError, SextetError."""
    serving = _serving(role, body)
    prompts = await asyncio.to_thread(_prompts, serving, body.prompt)
    return Job(serving, body, "text_completion", prompts, _params(serving, body, prompts, body.max_tokens))


async def chat_job(role: RolloutRole, body: ChatBody, session: Session | None) -> Job:
    """Raises ApiError, SextetError."""
    serving, messages = _serving(role, body), body.plain()
    arguments = {**serving.config.data.chat_template_kwargs, **body.chat_template_kwargs}
    try:
        text = await asyncio.to_thread(_rendered, serving.tokenizer, messages, body.tools, arguments)
    except DataError as error:
        raise ApiError(str(error), param="messages") from None
    if session is None:
        parent, ids = None, list(serving.tokenizer(text, add_special_tokens=False)["input_ids"])
    else:
        _as_the_run_samples(serving, body)
        parent, ids = await asyncio.to_thread(session.prompt, serving.tokenizer, text)
    params = _params(serving, body, [ids], body.max_completion_tokens or body.max_tokens)
    if session and session.task:
        params = replace(params, greedy=session.task.greedy)
    return Job(serving, body, "chat.completion", [ids], params, session, parent, text)


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, arguments: dict[str, Any]) -> str:
    """The template's text. Raises ApiError where it would leave the tools out without a word; DataError."""
    if not tools:
        return prompt_text(tokenizer, messages, arguments)
    text = prompt_text(tokenizer, messages, {**arguments, "tools": tools})
    if text == prompt_text(tokenizer, messages, arguments):
        raise ApiError("the model's chat template says nothing of tools: describe them in a message", param="tools")
    return text


def _serving(role: RolloutRole, body: Sampling) -> Serving:
    serving = role.serving()
    names = (POLICY, serving.run, serving.config.model.path)
    if body.model not in names:
        text = f"there is no model {body.model!r} here; there is {POLICY!r}, also called {serving.run!r}"
        raise ApiError(text, status=404, param="model", code="model_not_found")
    return serving


def _prompts(serving: Serving, prompt: Any) -> list[list[int]]:
    """Ids of every prompt: a list of ids is one prompt."""
    several = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(several) > MAX_PROMPTS:
        raise ApiError(f"{len(several)} prompts in a request: {MAX_PROMPTS} at most", param="prompt")
    return [list(each) if isinstance(each, list) else prompt_ids(serving.tokenizer, each, {}) for each in several]


def _params(
    serving: Serving, body: ChatBody | CompletionBody, prompts: Sequence[Sequence[int]], max_tokens: int | None
) -> SamplingParams:
    asked, vocabulary = serving.config.rollout, len(serving.tokenizer)
    for ids in prompts:
        if not ids or len(ids) >= serving.context:
            text = (
                f"a prompt of {len(ids)} tokens: this run's engine takes 1 to {serving.context - 1} (rollout.context)"
            )
            raise ApiError(text, param="prompt", code="context_length_exceeded")
        _refuse_unknown(ids, vocabulary, "prompt")
    if body.temperature is not None and 0 < body.temperature < LEAST_TEMPERATURE:
        text = f"temperature={body.temperature:g}: 0 for what is most likely, or {LEAST_TEMPERATURE} at least"
        raise ApiError(text, param="temperature")
    stops = {*serving.end_ids, *asked.stop_token_ids, *body.stop_token_ids}
    _refuse_unknown(body.stop_token_ids, vocabulary, "stop_token_ids")
    if len(stops) > MAX_STOP_IDS:
        text = f"{len(stops)} stop tokens, those of the model and of the run among them: {MAX_STOP_IDS} at most"
        raise ApiError(text, param="stop_token_ids")
    greedy = body.temperature == 0
    return SamplingParams(
        temperature=asked.temperature if greedy or body.temperature is None else body.temperature,
        top_p=asked.top_p if body.top_p is None else body.top_p,
        top_k=asked.top_k if body.top_k is None else body.top_k,
        max_tokens=max_tokens or asked.max_tokens,
        min_tokens=body.min_tokens,
        stop=asked.stop if body.stops is None else body.stops,
        stop_token_ids=tuple(sorted(stops)),
        greedy=greedy,
        likely=body.likely,
    )


def _refuse_unknown(ids: Sequence[int], vocabulary: int, param: str) -> None:
    if max(ids, default=0) >= vocabulary:
        raise ApiError(f"token id {max(ids)}: the vocabulary has {vocabulary}", param=param)


def _as_the_run_samples(serving: Serving, body: ChatBody) -> None:
    """A session is trained on: its log-probs must be those of the run's policy."""
    for name in ("temperature", "top_p", "top_k"):
        wanted, given = getattr(serving.config.rollout, name), getattr(body, name)
        if given not in (None, wanted):
            raise ApiError(f"a session samples as its run does: {name}={wanted}, not {given}", param=name)
    if body.n != 1:
        raise ApiError(f"a session's turn has one answer, not n={body.n}: start a session for each", param="n")
