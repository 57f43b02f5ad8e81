"""Samples as OpenAI's answers: whole, or as the pieces of a stream."""

from collections.abc import Sequence
from typing import Any

from services.rollout.backend import Sample, SamplingParams
from services.rollout.text import decode, response_text

_INCOMPLETE = "\ufffd"
LEAST = -9999.0
"""What clients are told of a log-prob that is not finite: JSON has no word for it."""


class TextStream:
    """A growing row's text: what can be said already, and is never taken back.

    Text that may be the beginning of a stop string, or of a character of several tokens, is held back.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._said = ""
        self._tokens = 0

    def push(self, sample: Sample, done: bool) -> tuple[str, Sample]:
        """The new text, and the new tokens as a sample of their own."""
        whole = response_text(self._tokenizer, sample, self._params) if done else self._sure(sample)
        new = whole[len(self._said) :] if whole.startswith(self._said) else ""
        self._said += new
        at, self._tokens = self._tokens, len(sample.response_ids)
        tail = Sample(
            sample.uid,
            sample.sample,
            sample.prompt_ids,
            sample.response_ids[at:],
            sample.logprobs[at:],
            sample.versions[at:],
            sample.finish,
            sample.likely[at:],
        )
        return new, tail

    def _sure(self, sample: Sample) -> str:
        text = decode(self._tokenizer, sample.response_ids).rstrip(_INCOMPLETE)
        held = 0
        for stop in self._params.stop:
            for length in range(1, len(stop)):
                if text.endswith(stop[:length]):
                    held = max(held, length)
        return text[: len(text) - held]


def completion_logprobs(tokenizer: Any, sample: Sample, offset: int) -> dict[str, Any]:
    """The legacy shape. `top_logprobs` is null where no alternatives were asked for."""
    tokens = [_token(tokenizer, token) for token in sample.response_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    places = zip(tokens, sample.logprobs, sample.likely, strict=True) if sample.likely else ()
    # The sampled token is among them, as clients expect.
    top = [
        {**{_token(tokenizer, other): max(value, LEAST) for other, value in likely}, token: logprob}
        for token, logprob, likely in places
    ]
    logprobs = list(sample.logprobs)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top or None, "text_offset": offsets}


def chat_logprobs(tokenizer: Any, sample: Sample) -> dict[str, Any]:
    """The chat shape."""
    likely = sample.likely or [()] * len(sample.response_ids)
    content = [
        {
            **_chat_token(tokenizer, token, value),
            "top_logprobs": [_chat_token(tokenizer, other, max(logprob, LEAST)) for other, logprob in others],
        }
        for token, value, others in zip(sample.response_ids, sample.logprobs, likely, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    text = _token(tokenizer, token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def version_spans(versions: Sequence[int]) -> list[list[int]]:
    """[[version, tokens], ...] in order: which weights sampled what."""
    spans: list[list[int]] = []
    for version in versions:
        if spans and spans[-1][0] == version:
            spans[-1][1] += 1
        else:
            spans.append([version, 1])
    return spans


def usage(prompts: Sequence[Sequence[int]], samples: Sequence[Sample]) -> dict[str, int]:
    """Tokens read and written."""
    read, written = sum(map(len, prompts)), sum(len(sample.response_ids) for sample in samples)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _token(tokenizer: Any, token: int) -> str:
    return tokenizer.decode([token], clean_up_tokenization_spaces=False)
