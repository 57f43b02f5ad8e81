"""What a generation engine must be able to do, whichever it is. Torch-free.

Law 5: an engine takes token ids and gives token ids; text is made of them afterwards (see text.py) and never read back.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shared.config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

    from shared.weights.codec import Kept
    from shared.weights.join import Receiver
    from shared.weights.part import WirePart

Finish = Literal["stop", "length", "aborted"]
Likely = tuple[tuple[int, float], ...]
"""Tokens and their log-probs, the most likely one first."""
MAX_LIKELY = 20
LEAST_TEMPERATURE = 0.01
"""What is below, vLLM raises to it without an error."""


class EngineError(RuntimeError):
    """The engine cannot do what it is asked; the text says why and what to change."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one row are drawn.

    Attributes:
        temperature: > 0; log-probs are at this temperature, also when decoding greedily.
        top_p, top_k: the smallest set of most likely tokens with at least this probability; 0 turns top_k off.
        max_tokens: response tokens at most, a partial sample's included; less where the context has no room.
        min_tokens: before so many tokens no stop token is drawn and no stop string ends the row.
        stop: strings that end the row when they appear in its text; their tokens stay in the response.
        stop_token_ids: every token that ends the row, the model's own end-of-sequence tokens included.
        greedy: take the most likely token.
        likely: so many of the most likely tokens are reported at every place, at most MAX_LIKELY.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    likely: int = 0


@dataclass(frozen=True)
class Sample:
    """One response, finished or cut off by `abort`.

    Attributes:
        response_ids: as sampled, with the stop token that ended it.
        logprobs: of each response token: log_softmax(logits / temperature), before min_tokens, top_k and top_p.
        versions: of each response token: the weight version that sampled it.
        finish: stop (stop token or string), length (max_tokens or context), or aborted (may be resumed).
        likely: where asked for, of each response token: the most likely ones at its place, log-probs as above.
    """

    uid: str
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    likely: tuple[Likely, ...] = ()


@dataclass(frozen=True)
class SampleRequest:
    """One row to generate.

    Attributes:
        uid, sample: identity of the row.
        prompt_ids: at least one token.
        seed: of this row alone; response token k is drawn with the k-th number of its sequence.
        params: how.
        partial: an aborted sample of this row, to go on with; its tokens keep their versions.
    """

    uid: str
    sample: int
    prompt_ids: tuple[int, ...]
    seed: int
    params: SamplingParams
    partial: Sample | None = None


@dataclass(frozen=True)
class EngineFacts:
    """What a configured engine is.

    Attributes:
        engine: its name.
        context: prompt and response tokens a row may have together.
        batch_invariant: a row's bits do not depend on what shares its batch (law 7).
        facts: more, for people.
    """

    engine: str
    context: int
    batch_invariant: bool
    facts: Mapping[str, str]


class GenerationBackend(Protocol):
    """An engine. Calls may overlap: rows of several `generate` calls share the engine.

    Attributes:
        beats: counts what it has done; while that grows it is alive, however long its queue is.
    """

    @property
    def beats(self) -> int: ...

    async def configure(self, config: RunConfig, tokenizer: Any, prompt_tokens: int) -> EngineFacts:
        """Loads config.model as version 0; what was configured before is released.

        Args:
            tokenizer: the model's.
            prompt_tokens: tokens of the longest prompt of the run's datasets.

        Raises:
            EngineError: this model, device or configuration is not one for this engine.
        """
        ...

    def turn(self) -> AbstractAsyncContextManager[None]:
        """The run's step samples meanwhile: by `generate`, or by what agents ask over the endpoint.

        An engine that shares its GPU stays awake between these rows, and sleeps before the turn ends (of turns that
        overlap, the last). Rows that come later wait, for the next turn or for the commit of a version.
        """
        ...

    def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[Sample]:
        """Yields every row as soon as it is done, in no given order. Leaving the iteration gives up the rest.

        Raises:
            EngineError: a prompt without room for a token, or a failure of the engine.
        """
        ...

    async def receiver(self, part: "WirePart", kept: "Kept | None") -> "Receiver":
        """Where a version goes that is taken together with other replicas.

        Args:
            part: this process's.
            kept: what this process has of the serving version; None: everything travels every time.

        Raises:
            EngineError: not configured, or dead.
        """
        ...

    async def prepare_weights(self, version: int, tensors: "Mapping[str, Tensor] | None") -> None:
        """Brings verified tensors beside the serving ones; replaces an earlier version.

        Args:
            tensors: by state-dict name; None: what the engine's own receiver has taken.

        Raises:
            EngineError: names, shapes or ties are not this model's; nothing is changed.
        """
        ...

    async def commit_weights(self, version: int) -> None:
        """Serves the prepared version once the rows in progress are done; nothing cached of the old one is used again.

        Raises:
            EngineError: this version is not prepared.
        """
        ...

    async def abort(self) -> None:
        """Ends all rows in progress; their iterators yield them as they are, with finish "aborted"."""
        ...

    async def health(self) -> str:
        """Computes a token; empty when that works, else why not."""
        ...

    async def release(self) -> None:
        """Frees the model and its memory."""
        ...
