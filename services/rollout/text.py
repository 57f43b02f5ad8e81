"""Text made of sampled tokens: to notice stop strings while a row grows, and for graders when it is done."""

from collections.abc import Sequence
from typing import Any

from services.rollout.backend import Sample, SamplingParams

_INCOMPLETE = "\ufffd"
_AS_THEY_ARE = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}


class StopWatch:
    """Says when a row is finished by its last token.

    Args:
        tokenizer: the model's.
        params: the row's.
        already: response tokens of an earlier part.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, already: Sequence[int] = ()) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._ids: list[int] = []
        self._count = 0
        # Text is made of ids[start:]; ids[start:read] is what has been looked at. A few tokens before are needed, as
        # some tokenizers write a token differently at the start of a text.
        self._start = self._read = 0
        self._tail = ""
        self._longest = max((len(stop) for stop in params.stop), default=0)
        for token in already:
            self.push(token)

    def push(self, token: int) -> bool:
        """Takes the row's next token; True when it ends the row."""
        self._count += 1
        completed = bool(self._params.stop) and self._completes_stop(token)
        if self._count < self._params.min_tokens:
            return False
        return completed or token in self._params.stop_token_ids

    def _completes_stop(self, token: int) -> bool:
        self._ids.append(token)
        before = decode(self._tokenizer, self._ids[self._start : self._read])
        now = decode(self._tokenizer, self._ids[self._start :])
        seen = self._tail + now[len(before) :]
        if len(now) > len(before) and not now.endswith(_INCOMPLETE):
            self._start, self._read = self._read, len(self._ids)
            self._tail = seen[max(0, len(seen) - self._longest + 1) :]
        return any(stop in seen for stop in self._params.stop)


def response_text(tokenizer: Any, sample: Sample, params: SamplingParams) -> str:
    """The response without special tokens, cut where the stop string that ended it begins."""
    return response_texts(tokenizer, [sample], params)[0]


def response_texts(tokenizer: Any, samples: Sequence[Sample], params: SamplingParams) -> list[str]:
    """`response_text` of each, which fast tokenizers do on all cores."""
    ids = [list(sample.response_ids) for sample in samples]
    texts = tokenizer.batch_decode(ids, **_AS_THEY_ARE)
    return [_cut(tokenizer, sample, params, text) for sample, text in zip(samples, texts, strict=True)]


def _cut(tokenizer: Any, sample: Sample, params: SamplingParams, text: str) -> str:
    if sample.finish != "stop" or sample.response_ids[-1] in params.stop_token_ids:
        return text
    # The last token completed it; the same string may stand earlier, before min_tokens.
    before = len(decode(tokenizer, sample.response_ids[:-1]).rstrip(_INCOMPLETE))
    found = [text.find(stop, max(0, before - len(stop) + 1)) for stop in params.stop]
    return text[: min((place for place in found if place >= 0), default=len(text))]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of token ids, special tokens left out, spaces as they are."""
    return tokenizer.decode(list(ids), **_AS_THEY_ARE)
