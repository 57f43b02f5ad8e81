"""A row as a vLLM request: what is asked of the engine, and what its outputs add up to."""

# vLLM is an extra: most environments that check types do not have it.
# pyright: reportMissingImports=false

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from services.rollout.backend import EngineError, Finish, Likely, Sample, SampleRequest
from services.rollout.text import StopWatch
from shared.config import RunConfig

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

_LENGTH_MULTIPLE = 64
START_BITS = 20
"""Of the seed of a row that the first model runner draws: how many tokens of it were drawn before; no row is longer."""
_SEED_BITS = 63


def length_of(config: RunConfig, prompt_tokens: int) -> int:
    """Tokens of a row's prompt and response together: as the run needs, where the model's context has room."""
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(config.model.path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise EngineError(f"model.path: {config.model.path!r} holds no usable model: {error}") from None
    rounded = -(-(prompt_tokens + config.rollout.max_tokens) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    return min(rounded, getattr(model, "max_position_embeddings", rounded))


def _ranked(values: Any) -> Likely:
    """vLLM's log-probs at a place; the sampled token, which may be an unlikely one, is among them."""
    ranked = sorted((value.rank, token, value.logprob) for token, value in values.items())
    return tuple((token, logprob) for _, token, logprob in ranked)


def _until_stop(tokens: Sequence[int], watch: StopWatch) -> tuple[int, bool]:
    """How many of these tokens are the row's, and whether the last of them ends it."""
    for place, token in enumerate(tokens):
        if watch.push(token):
            return place + 1, True
    return len(tokens), False


class VllmRow:
    """A row in progress.

    Args:
        name: the request's id, used once.
        length: tokens it may have together with its prompt.
        tokenizer: finds stop strings.
        version: of the weights that serve.

    Raises:
        EngineError: the prompt is empty or leaves no room for a token.
    """

    def __init__(self, request: SampleRequest, name: str, length: int, tokenizer: Any, version: int) -> None:
        prompt = len(request.prompt_ids)
        if not prompt:
            raise EngineError(f"prompt {request.uid} is empty")
        if prompt >= length:
            raise EngineError(
                f"prompt {request.uid} has {prompt} tokens: no room for a response in {length} positions; "
                "raise data.max_prompt_tokens or rollout.max_tokens, as far as the model's context goes"
            )
        self.request, self.name = request, name
        self._version, self._limit = version, min(request.params.max_tokens, length - prompt)
        earlier = request.partial
        self._ids, self._logprobs, self._versions = (
            (list(earlier.response_ids), list(earlier.logprobs), list(earlier.versions)) if earlier else ([], [], [])
        )
        self._likely: list[Likely] = list(earlier.likely) if earlier else []
        self._watch = StopWatch(tokenizer, request.params, self._ids) if request.params.stop else None
        self._finish: Finish = "length" if len(self._ids) >= self._limit else "aborted"

    def ids(self) -> list[int]:
        """What the engine is to go on from."""
        return [*self.request.prompt_ids, *self._ids]

    def params(self, resumes_by_position: bool) -> "SamplingParams":
        """As vLLM wants them. Greedy is a temperature with top_k=1, so that log-probs are at the temperature.

        Args:
            resumes_by_position: the engine's noise depends on the position; else the seed says where to begin.
        """
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        asked, before = self.request.params, len(self._ids)
        mixed = self.request.seed % (1 << _SEED_BITS)
        return SamplingParams(
            temperature=asked.temperature,
            top_p=1.0 if asked.greedy else asked.top_p,
            top_k=1 if asked.greedy else asked.top_k,
            max_tokens=self._limit - before,
            min_tokens=max(0, min(asked.min_tokens, self._limit) - before),
            stop_token_ids=list(asked.stop_token_ids),
            seed=mixed if resumes_by_position else (mixed >> START_BITS << START_BITS) + before,
            logprobs=asked.likely,
            # Plain lists instead of an object for every token, which Python's garbage collector would visit.
            flat_logprobs=True,
            detokenize=False,
            # The model's own end tokens are among stop_token_ids.
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA if self._watch else RequestOutputKind.FINAL_ONLY,
        )

    def take(self, output: Any) -> bool:
        """Adds what an output brings; True when the row is done."""
        tokens, flat = output.token_ids, output.logprobs
        count, stopped = _until_stop(tokens, self._watch) if self._watch else (len(tokens), False)
        if count:
            # The sampled token's comes first.
            self._add(tokens[:count], [flat.logprobs[start] for start in flat.start_indices[:count]])
            if self.request.params.likely:
                self._likely += [_ranked(flat[place])[: self.request.params.likely] for place in range(count)]
        if stopped:
            self._finish = "stop"
            return True
        if output.finish_reason in ("stop", "length"):
            self._finish = output.finish_reason
        elif output.finish_reason not in (None, "abort"):
            raise EngineError(f"vLLM ended row {self.request.uid} with {output.finish_reason!r}; its own log says why")
        return output.finish_reason is not None

    def _add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        if not all(map(math.isfinite, logprobs)):
            raise EngineError(f"weight version {self._version} gives no finite distribution (row {self.request.uid})")
        self._ids += tokens
        self._logprobs += logprobs
        self._versions += [self._version] * len(tokens)

    def sample(self) -> Sample:
        asked = self.request
        content = (tuple(self._ids), tuple(self._logprobs), tuple(self._versions))
        return Sample(asked.uid, asked.sample, asked.prompt_ids, *content, self._finish, tuple(self._likely))
