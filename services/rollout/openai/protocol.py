"""What the OpenAI API asks: request bodies with checked names, and its way to say no. Torch-free."""

import json
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.rollout.backend import MAX_LIKELY
from shared.http import STATUS
from shared.openai import HTTP_HANDLERS, problem
from shared.rpc.errors import SextetError

POLICY = "policy"
"""The model's name: whatever is being trained. The run's id and the model's path are taken, too."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Known and not done: taken with these values only."""
IGNORED = ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier")
"""They say nothing about sampling."""

Ids = list[Annotated[int, Field(ge=0, lt=2**31)]]


class ApiError(Exception):
    """A refusal in OpenAI's shape."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(BaseModel):
    """What both kinds of completions share. None: as the run samples.

    `return_token_ids`, `top_k`, `min_tokens` and `stop_token_ids` are vLLM's additions.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = POLICY
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Ids = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_not_done(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, neutral in NEUTRAL.items():
            if values.get(name) is not None and values[name] not in neutral:
                raise ValueError(f"{name}={values[name]!r} is not supported here: leave it out")
        return {name: value for name, value in values.items() if name not in NEUTRAL and name not in IGNORED}

    @property
    def stops(self) -> tuple[str, ...] | None:
        """Stop strings; None when not given."""
        if self.stop is None:
            return None
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(Sampling):
    """POST /v1/completions. `logprobs`: those of the sampled tokens, and of so many of the most likely ones."""

    prompt: str | Ids | list[str] | list[Ids]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LIKELY)] | None = None

    @property
    def likely(self) -> int:
        """Alternatives wanted."""
        return self.logprobs or 0


class Message(BaseModel):
    """A chat message, as the model's template takes it."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LIKELY)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _alternatives_are_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        return self

    @property
    def likely(self) -> int:
        """Alternatives wanted."""
        return self.top_logprobs or 0

    def plain(self) -> list[dict[str, Any]]:
        """Messages as a template takes them; text parts are joined.

        Raises:
            ApiError: a part is not text.
        """
        return [_plain(message) for message in self.messages]


def _plain(message: Message) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        if kinds := {str(part.get("type")) for part in message.content} - {"text"}:
            raise ApiError(f"content parts of type {', '.join(sorted(kinds))} are not supported", param="messages")
        fields["content"] = "".join(str(part.get("text", "")) for part in message.content)
    if "tool_calls" in fields:
        fields["tool_calls"] = [_with_arguments(call) for call in fields["tool_calls"]]
    return fields


def _with_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object: OpenAI sends them as JSON text, and templates write them out."""
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])
    except (TypeError, KeyError, ValueError):
        raise ApiError(f"tool_calls: {str(call)[:80]} is not a call of a function", param="messages") from None
    return {**call, "function": function}


async def on_api_error(request: Request, error: Any) -> JSONResponse:
    return problem(str(error), error.status, error.param, error.code)


async def on_sextet_error(request: Request, error: Any) -> JSONResponse:
    # What the pool can't do now it may do in a moment: clients try again after a 503.
    status = STATUS.get(error.code, 500)
    return problem(str(error), 503 if status == 409 else status, code=error.code.name.lower())


async def on_body_error(request: Request, error: Any) -> JSONResponse:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    text = first["msg"].removeprefix("Value error, ")
    return problem(f"{place}: {text}" if place else text, 400, place or None)


HANDLERS: dict[Any, Any] = {
    ApiError: on_api_error,
    SextetError: on_sextet_error,
    **HTTP_HANDLERS,
    RequestValidationError: on_body_error,
}
