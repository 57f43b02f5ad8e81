"""vLLM's scheduler, handing over the tokens of a row several at a time.

vLLM sends every token of every row by itself from its engine to the process that asked for it, with three small arrays
for its log-probs. With a small model that takes as long as computing the tokens. Nobody looks at a row of ours before
it is done, unless it has stop strings, so its tokens go in bundles, and log-probs are cut into rows only then.
"""

# vLLM is an extra: most environments that check types do not have it.
# pyright: reportMissingImports=false

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

BUNDLE_SECONDS = 0.5
"""So long tokens wait for those that travel with them. An aborted row loses what has not left yet."""
_PER_TOKEN = {"routed_experts", "new_sampling_mask"} & set(EngineCoreOutput.__struct_fields__)
"""What else an output may bring of its token, by vLLM's version, if the engine is told to."""


@dataclass(slots=True)
class _Waiting:
    """What has not left yet of a row: tokens, and the log-prob of each."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def go_with(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """The row's last output with all of it."""
        output.new_token_ids = self.tokens
        if self.tokens:
            # Ranks tell apart several log-probs of a token: there is one.
            columns = np.array(self.tokens)[:, None], np.array(self.logprobs, np.float32)[:, None]
            output.new_logprobs = LogprobsLists(*columns, np.ones(len(self.tokens), np.int64))
        self.tokens, self.logprobs = [], []
        return output


class _InBundles:
    """Mixed into a scheduler of vLLM's. All rows are to ask for log-probs."""

    requests: Mapping[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: dict[str, _Waiting] = {}
        self._due = 0.0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """What vLLM's gives, by client, less what waits for more of its row."""
        # vLLM would make three arrays of them for each row.
        logprobs, model_runner_output.logprobs = model_runner_output.logprobs, None
        everything = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for outputs in everything.values():
            outputs.outputs = list(self._leaving(outputs.outputs, model_runner_output.req_id_to_index, logprobs))
        for aborted in self._waiting.keys() - self.requests.keys():
            del self._waiting[aborted]
        return {
            client: outputs
            for client, outputs in everything.items()
            if outputs.outputs or outputs.scheduler_stats or outputs.finished_requests
        }

    def _leaving(
        self, outputs: Sequence[EngineCoreOutput], places: Mapping[str, int], logprobs: LogprobsLists | None
    ) -> Iterator[EngineCoreOutput]:
        # Once for all rows: this loop has about as long for a row as the GPU has for its token.
        sampled = [] if logprobs is None else logprobs.logprobs[:, 0].tolist()
        if all_leave := (now := time.monotonic()) >= self._due:
            self._due = now + BUNDLE_SECONDS
        for output in outputs:
            row = self._waiting.get(output.request_id)
            if row is None:
                if logprobs is not None and output.new_token_ids:
                    place = places[output.request_id]
                    output.new_logprobs = logprobs.slice_request(place, len(output.new_token_ids))
                if self._can_wait(output):
                    self._waiting[output.request_id] = _Waiting()
                yield output
                continue
            if output.new_token_ids:
                row.tokens.extend(output.new_token_ids)
                row.logprobs.append(sampled[places[output.request_id]])
            if all_leave or output.finish_reason is not None or output.events is not None:
                yield row.go_with(output)

    def _can_wait(self, output: EngineCoreOutput) -> bool:
        """Whether what comes after a row's first output, this one, may wait."""
        request = self.requests.get(output.request_id)
        params = request and request.sampling_params
        return (
            params is not None
            and params.output_kind == RequestOutputKind.FINAL_ONLY
            and params.logprobs == 0
            and all(getattr(output, name) is None for name in _PER_TOKEN)
        )


class BundlingScheduler(_InBundles, Scheduler):
    """For steps one after the other."""


class BundlingAsyncScheduler(_InBundles, AsyncScheduler):
    """For steps that are scheduled before the one before has ended."""


def make_scheduler(vllm_config: Any, **arguments: Any) -> Scheduler:
    """What vLLM calls as its `scheduler_cls`."""
    chosen = BundlingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else BundlingScheduler
    return chosen(vllm_config=vllm_config, **arguments)
