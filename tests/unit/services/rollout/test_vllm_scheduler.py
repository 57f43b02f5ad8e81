"""A row's tokens leave vLLM's engine in bundles: nothing is lost, doubled or late, each with its log-prob."""

import math
import time
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
    BUNDLE_SECONDS,
    BundlingAsyncScheduler,
    BundlingScheduler,
    _InBundles,
)

WAITS, LOOKED_AT = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


class FakeScheduler:
    """What vLLM's scheduler gives: an output for each (row, token, rest) of the model runner's step."""

    def __init__(self, **kinds):
        self.requests = {name: _request(kind) for name, kind in kinds.items()}

    def update_from_output(self, step, model_runner_output):
        assert model_runner_output.logprobs is None
        outputs = [EngineCoreOutput(name, [] if token is None else [token], **rest) for name, token, rest in step]
        for name, _, rest in step:
            if "finish_reason" in rest:
                del self.requests[name]
        return {0: EngineCoreOutputs(outputs=outputs)}


class Bundling(_InBundles, FakeScheduler):
    def play(self, *steps, due=()):
        """(step, row, tokens, log-probs, finish reason) of everything that goes; in steps `due` it is time to go."""
        went = []
        for number, step in enumerate(steps):
            self._due = 0 if number in due else math.inf
            for outputs in self.update_from_output(step, _computed(step)).values():
                for out in outputs.outputs:
                    went.append((number, out.request_id, out.new_token_ids, _logprobs(out), out.finish_reason))
        return went


def _request(kind, logprobs=0):
    return SimpleNamespace(sampling_params=SimpleNamespace(output_kind=kind, logprobs=logprobs))


def _computed(step):
    """The model runner's: rows in another order, and a log-prob that tells its token."""
    rows = [(name, token or 0) for name, token, _ in step][::-1]
    tokens = np.array([[token, 0] for _, token in rows])
    logprobs = LogprobsLists(tokens, -tokens.astype(np.float32) / 8, np.array([3] * len(rows)))
    return SimpleNamespace(logprobs=logprobs, req_id_to_index={name: k for k, (name, _) in enumerate(rows)})


def _logprobs(output):
    return [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()


def _went(step, name, tokens, reason=None):
    return step, name, list(tokens), [-token / 8 for token in tokens], reason


def _row(name, token, **rest):
    return name, token, rest


def test_the_first_token_goes_at_once_the_others_in_bundles_and_the_last_with_what_is_left():
    steps = [[_row("a", k), _row("b", 100 + k)] for k in range(8)]
    steps.append([_row("a", 8, finish_reason=FinishReason.LENGTH), _row("b", 108)])
    scheduler = Bundling(a=WAITS, b=WAITS)
    assert scheduler.play(*steps, due=[5]) == [
        _went(0, "a", [0]),
        _went(0, "b", [100]),
        _went(5, "a", range(1, 6)),
        _went(5, "b", range(101, 106)),
        _went(8, "a", range(6, 9), FinishReason.LENGTH),
    ]
    assert list(scheduler._waiting) == ["b"]


def test_it_is_time_again_after_so_many_seconds():
    scheduler, step = Bundling(a=WAITS), [_row("a", 0)]
    before = time.monotonic()
    scheduler.play(step, due=[0])
    assert before + BUNDLE_SECONDS <= scheduler._due <= time.monotonic() + BUNDLE_SECONDS


def test_a_row_that_is_looked_at_or_wants_more_log_probs_does_not_wait():
    scheduler = Bundling(a=LOOKED_AT, b=WAITS, c=WAITS)
    scheduler.requests["c"] = _request(WAITS, logprobs=2)
    found = scheduler.play(*([_row("a", k), _row("b", 10 + k), _row("c", 20 + k)] for k in range(3)))
    assert found == [_went(0, "a", [0]), _went(0, "b", [10]), _went(0, "c", [20])] + [
        _went(k, name, [first + k]) for k in (1, 2) for name, first in (("a", 0), ("c", 20))
    ]


def test_a_row_that_ends_with_its_first_token():
    scheduler = Bundling(a=WAITS)
    assert scheduler.play([_row("a", 7, finish_reason=FinishReason.STOP)]) == [_went(0, "a", [7], FinishReason.STOP)]
    assert scheduler._waiting == {}


def test_a_row_that_fails_without_a_token_brings_what_waited():
    found = Bundling(a=WAITS).play([_row("a", 0)], [_row("a", 1)], [_row("a", None, finish_reason=FinishReason.ERROR)])
    assert found == [_went(0, "a", [0]), _went(2, "a", [1], FinishReason.ERROR)]


def test_what_vllm_has_to_say_of_a_row_does_not_wait():
    found = Bundling(a=WAITS).play([_row("a", 0)], [_row("a", 1)], [_row("a", 2, events=[])])
    assert found == [_went(0, "a", [0]), _went(2, "a", [1, 2])]


def test_what_waits_of_an_aborted_row_is_forgotten():
    scheduler = Bundling(a=WAITS, b=WAITS)
    scheduler.play([_row("a", 0), _row("b", 5)], [_row("a", 1), _row("b", 6)])
    del scheduler.requests["a"]
    scheduler.play([_row("b", 7)])
    assert list(scheduler._waiting) == ["b"]


def test_nothing_is_sent_of_a_step_in_which_all_rows_wait():
    scheduler = Bundling(a=WAITS)
    scheduler.play([_row("a", 0)])
    step = [_row("a", 1)]
    assert scheduler.update_from_output(step, _computed(step)) == {}


def test_they_are_vllms_own_schedulers():
    assert issubclass(BundlingAsyncScheduler, AsyncScheduler)
    assert issubclass(BundlingScheduler, Scheduler)
    assert not issubclass(BundlingScheduler, AsyncScheduler)
