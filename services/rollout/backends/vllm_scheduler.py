"""vLLM's scheduler, handing over the tokens of a row several at a time.

vLLM sends every token of every row by itself from its engine to the process that asked for it, with three small arrays
for its log-probs. With a small model that takes as long as computing the tokens. Nobody looks at a row of ours before
it is done, unless it has stop strings, so its tokens go in bundles.
"""

# vLLM is an extra: most environments that check types do not have it.
# pyright: reportMissingImports=false

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

BUNDLE = 16
"""Tokens of a row that travel together. An aborted row loses those that have not left yet: at most one less."""
_SIZE = len(EngineCoreOutput.__struct_defaults__)
_DEFAULTS = dict(zip(EngineCoreOutput.__struct_fields__[-_SIZE:], EngineCoreOutput.__struct_defaults__, strict=True))
_NOTHING = {name: default for name, default in _DEFAULTS.items() if name != "new_logprobs"}
"""What an output may bring besides its row's name, tokens and log-probs, with the values that say that it does not."""
_others = operator.attrgetter(*_NOTHING)


class _InBundles:
    """Mixed into a scheduler of vLLM's."""

    requests: Mapping[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, list[EngineCoreOutput]] = {}

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """What vLLM's gives, by client, less the outputs that wait for more of their row."""
        everything = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for outputs in everything.values():
            outputs.outputs = [whole for output in outputs.outputs if (whole := self._take(output))]
        for aborted in self._held.keys() - self.requests.keys():
            del self._held[aborted]
        return {
            client: outputs
            for client, outputs in everything.items()
            if outputs.outputs or outputs.scheduler_stats or outputs.finished_requests
        }

    def _take(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """All that waits of this output's row, if that goes now."""
        held = self._held.setdefault(output.request_id, [])
        held.append(output)
        if len(held) < BUNDLE and self._can_wait(output):
            return None
        return _joined(self._held.pop(output.request_id))

    def _can_wait(self, output: EngineCoreOutput) -> bool:
        request = self.requests.get(output.request_id)
        params = request and request.sampling_params
        return (
            params is not None
            and params.output_kind == RequestOutputKind.FINAL_ONLY
            and all(map(operator.is_, _others(output), _NOTHING.values()))
        )


def _joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """A row's outputs as one: the last, with the tokens and log-probs of all."""
    if len(outputs) == 1:
        return outputs[0]
    whole = outputs[-1]
    whole.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    logprobs = [output.new_logprobs[:3] for output in outputs if output.new_logprobs is not None]
    if logprobs:
        whole.new_logprobs = LogprobsLists(*(np.concatenate(parts) for parts in zip(*logprobs, strict=True)))
    return whole


class BundlingScheduler(_InBundles, Scheduler):
    """For steps one after the other."""


class BundlingAsyncScheduler(_InBundles, AsyncScheduler):
    """For steps that are scheduled before the one before has ended."""


def make_scheduler(vllm_config: Any, **arguments: Any) -> Scheduler:
    """What vLLM calls as its `scheduler_cls`."""
    chosen = BundlingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else BundlingScheduler
    return chosen(vllm_config=vllm_config, **arguments)
