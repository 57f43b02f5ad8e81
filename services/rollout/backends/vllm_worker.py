"""What runs inside vLLM's worker processes: our log-probs, exact resumption, and the way to new weights.

vLLM's `raw_logprobs` are before the temperature and its `processed_logprobs` after min_tokens, top_k and top_p. Ours
are in between (see Sample.logprobs), so the sampler of either model runner is made to report
log_softmax(logits / temperature). Beside that greedy rows take the first of equal logits, and stop tokens are forbidden
for as long as min_tokens says, in all versions. Nothing else of their sampling is changed.
"""

# vLLM is an extra: most environments that check types do not have it.
# pyright: reportMissingImports=false

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.sampler import Sampler

from services.rollout.backends.vllm_rows import START_BITS
from services.rollout.backends.vllm_transfer import SextetTransfer
from shared.weights.memory import device_name, this_host, visible_devices

_MASK64 = 2**64 - 1


class SextetWorker:
    """Methods that `AsyncLLM.collective_rpc` calls, mixed into vLLM's worker class."""

    model_runner: Any
    rank: int
    device: torch.device
    weight_transfer_engine: SextetTransfer
    # vLLM's own, which hand over to that.
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[..., None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def sextet_setup(self) -> str:
        """Makes the sampler ours.

        Returns:
            "v1" where seeds carry START_BITS, "v2" where noise is a function of seed and position.
        """
        sampler = self.model_runner.sampler
        if sampler is None:
            # Of a pipeline's stages, the second model runner gives one to the last only.
            return "v2"
        if isinstance(sampler, Sampler):
            sampler.__class__ = TemperedSampler
            return "v1"
        sampler.__class__ = type("TemperedSamplerV2", (_TemperedV2, type(sampler)), {})
        # Otherwise it looks at the logits as they were, before temperatures.
        sampler.logprobs_mode = "processed_logprobs"
        return "v2"

    def sextet_ping(self) -> bool:
        return True

    def sextet_place(self) -> dict[str, Any]:
        """Where this worker is, for a transfer to it."""
        device, transfer = self.device, self.weight_transfer_engine
        return {
            "type": device.type,
            "host": this_host(),
            "device": device_name(device),
            "sees": visible_devices(device),
            "holds": transfer.part.holds if transfer.part else "",
            "has": dict(transfer.kept.digests),
        }

    def sextet_receive(self, answer: bytes, first_rank: int, host: str, keep: bool) -> None:
        """Starts to take part in a transfer (see vllm_transfer.Begin), as rank `first_rank` and this worker's own."""
        begin = {"answer": answer, "rank": first_rank + self.rank, "host": host, "device": self.device, "keep": keep}
        self.init_weight_transfer_engine(begin)

    def sextet_received(self) -> dict[str, Any]:
        """How far that is."""
        arriving = self.weight_transfer_engine.arriving
        assert arriving is not None
        return {"done": arriving.done, "error": arriving.error, "pieces": arriving.pieces if arriving.done else []}

    def sextet_take(self, path: str, scrub: bool) -> None:
        """Takes the weights of a file or, without a path, those that arrived.

        Args:
            scrub: keys and values are zeroed, too. Masked positions count 0 times what stands there: NaN if that is.
        """
        self.start_weight_update(**self._start_options())
        self.update_weights({"path": path})
        self.finish_weight_update()
        if scrub:
            for cache in self.model_runner.kv_caches:
                for part in cache if isinstance(cache, list) else [cache]:
                    part.zero_()

    def _start_options(self) -> dict[str, bool]:
        """Of `start_weight_update`: vLLM 0.23 begins its own reload unless it is told that none is wanted."""
        reloads = "is_checkpoint_format" in inspect.signature(self.start_weight_update).parameters
        return {"is_checkpoint_format": not self.weight_transfer_engine.in_place} if reloads else {}


class TemperedSampler(Sampler):
    """The first model runner's."""

    _temperature_N1: Tensor | None = None
    _positioned: "weakref.WeakKeyDictionary[torch.Generator, _Positioned] | None" = None

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        temperature_N = sampling_metadata.temperature
        self._temperature_N1 = None if temperature_N is None else temperature_N[:, None]
        self._position(sampling_metadata.generators)
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def sample(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        top_k_N = sampling_metadata.top_k
        if top_k_N is None:
            return super().sample(logits, sampling_metadata, *args, **kwargs)
        # Before what divides logits in place.
        first_N = logits.argmax(-1)
        sampled_N, processed = super().sample(logits, sampling_metadata, *args, **kwargs)
        return first_of_equals(sampled_N, top_k_N, first_N), processed

    def _position(self, generators: dict[int, torch.Generator]) -> None:
        """Makes each row's generator draw the number of its position. The dictionary is the model runner's own."""
        if self._positioned is None:
            self._positioned = weakref.WeakKeyDictionary()
        for row, generator in generators.items():
            if not isinstance(generator, _Positioned):
                # A preempted row comes back with the generator it began with.
                generators[row] = generator = self._positioned.setdefault(generator, _positioned(generator))
            generator.advance()

    def compute_logprobs(self, logits: Tensor) -> Tensor:  # type: ignore[override]
        scaled_NV = logits.float() if self._temperature_N1 is None else logits.float() / self._temperature_N1
        return scaled_NV.log_softmax(dim=-1)


class _TemperedV2:
    """The second model runner's; its `processed_logits` are what log-probs are made of."""

    sampling_states: Any
    logit_bias_state: Any

    def add_request(self, row: int, *args: Any, **kwargs: Any) -> Any:
        added = super().add_request(row, *args, **kwargs)  # type: ignore[misc]
        if stops_are_late():
            self.logit_bias_state.min_lens.np[row] -= 1
        return added

    def sample(self, logits: Tensor, expanded_idx_mapping: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        states = self.sampling_states
        scaled_NV = logits.float() / states.temperature.gpu[expanded_idx_mapping][:, None]
        sampled_N, processed_NV = super().sample(logits, expanded_idx_mapping, *args, **kwargs)  # type: ignore[misc]
        if (states.top_k.np == 1).any():
            top_k_N = states.top_k.gpu[expanded_idx_mapping]
            sampled_N = first_of_equals(sampled_N, top_k_N, processed_NV.argmax(-1))
        return sampled_N, scaled_NV


def first_of_equals(sampled_N: Tensor, top_k_N: Tensor, first_N: Tensor) -> Tensor:
    """What was sampled; of rows with top_k=1, which is how rows are greedy (see VllmRow.params), `first_N`.

    vLLM 0.23 keeps all that are as likely as the most likely one, if a step has few rows, and draws among them.
    """
    return torch.where(top_k_N == 1, first_N.to(sampled_N.dtype), sampled_N)


@functools.cache
def stops_are_late() -> bool:
    """Whether the second model runner forbids stop tokens for one token more than min_tokens, as vLLM 0.23's does."""
    from vllm.v1.worker.gpu.sample import logit_bias

    return "pos < min_len" in inspect.getsource(logit_bias)


class _Positioned(torch.Generator):
    """A generator whose next number depends on the row's seed and the token's position alone.

    The model runner takes a draw back (a prompt in chunks) by the offset, which CPU generators do not have: vLLM's CPU
    engine dies of it.
    """

    row_seed = position = 0

    def advance(self) -> None:
        # Mixed, as a CPU generator looks at 32 bits of its seed only.
        self.manual_seed(_mix(self.row_seed + _mix(self.position)))
        self.position += 1

    def get_offset(self) -> int:
        return 4 * self.position

    def set_offset(self, offset: int) -> torch.Generator:
        self.position = offset // 4
        return self


def _positioned(generator: torch.Generator) -> _Positioned:
    seed, made = generator.initial_seed(), _Positioned(generator.device)
    made.row_seed, made.position = seed >> START_BITS, seed & ((1 << START_BITS) - 1)
    return made


def _mix(number: int) -> int:
    """SplitMix64's mixing of a counter, 63 bits of it. Source: see sampler.py."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & _MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
    return (z ^ (z >> 31)) >> 1
