"""A row's tokens leave vLLM's engine in bundles: nothing is lost, doubled or late."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from services.rollout.backends.vllm_scheduler import (
    BUNDLE,
    BundlingAsyncScheduler,
    BundlingScheduler,
    _InBundles,
)


class FakeScheduler:
    """What vLLM's scheduler gives, one script of outputs a step."""

    def __init__(self, kinds):
        self.requests = {
            name: SimpleNamespace(sampling_params=SimpleNamespace(output_kind=kind)) for name, kind in kinds.items()
        }
        self.script = []

    def update_from_output(self):
        return {0: EngineCoreOutputs(outputs=self.script.pop(0))}


class Bundling(_InBundles, FakeScheduler):
    pass


def _output(name, token, **more):
    logprobs = LogprobsLists(np.array([[token]]), np.array([[-token / 8]], np.float32), np.array([token + 1]))
    return EngineCoreOutput(name, [token], new_logprobs=logprobs, **more)


def _play(scheduler, script):
    """(step, row, tokens, log-probs, finish reason) of everything that goes."""
    scheduler.script = script
    return [
        (step, out.request_id, out.new_token_ids, out.new_logprobs.logprobs[:, 0].tolist(), out.finish_reason)
        for step in range(len(script))
        for outputs in scheduler.update_from_output().values()
        for out in outputs.outputs
    ]


def _expected(step, name, tokens, reason=None):
    return step, name, list(tokens), [-token / 8 for token in tokens], reason


def test_the_first_token_goes_at_once_the_others_in_bundles_and_the_last_with_what_is_left():
    count = 1 + BUNDLE + 3
    script = [[_output("a", 0, prefill_stats=object())], *([_output("a", k)] for k in range(1, count - 1))]
    script.append([_output("a", count - 1, finish_reason=FinishReason.LENGTH)])
    assert _play(Bundling({"a": RequestOutputKind.FINAL_ONLY}), script) == [
        _expected(0, "a", [0]),
        _expected(BUNDLE, "a", range(1, BUNDLE + 1)),
        _expected(count - 1, "a", range(BUNDLE + 1, count), FinishReason.LENGTH),
    ]


def test_a_row_that_is_looked_at_while_it_is_made_does_not_wait():
    kinds = {"a": RequestOutputKind.DELTA, "b": RequestOutputKind.FINAL_ONLY}
    script = [[_output("a", k), _output("b", 10 + k)] for k in range(3)]
    assert _play(Bundling(kinds), script) == [_expected(k, "a", [k]) for k in range(3)]


def test_what_else_an_output_brings_does_not_wait_nor_what_came_before_it():
    script = [[_output("a", 0)], [_output("a", 1)], [_output("a", 2, num_nans_in_logits=1)]]
    assert _play(Bundling({"a": RequestOutputKind.FINAL_ONLY}), script) == [_expected(2, "a", [0, 1, 2])]


def test_what_waits_of_an_aborted_row_is_forgotten():
    scheduler = Bundling(dict.fromkeys("ab", RequestOutputKind.FINAL_ONLY))
    _play(scheduler, [[_output("a", 0), _output("b", 5)]])
    del scheduler.requests["a"]
    _play(scheduler, [[_output("b", 6)]])
    assert list(scheduler._held) == ["b"]


def test_nothing_is_sent_of_a_step_in_which_all_rows_wait():
    scheduler = Bundling({"a": RequestOutputKind.FINAL_ONLY})
    scheduler.script = [[_output("a", 0)]]
    assert scheduler.update_from_output() == {}


def test_they_are_vllms_own_schedulers():
    assert issubclass(BundlingAsyncScheduler, AsyncScheduler)
    assert issubclass(BundlingScheduler, Scheduler)
    assert not issubclass(BundlingScheduler, AsyncScheduler)
