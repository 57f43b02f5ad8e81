"""vLLM's second model runner, whose kernels run on GPUs only: log-probs, greedy rows, min_tokens."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")
import vllm
from vllm.v1.worker.gpu.sample import sampler as vllms

from services.rollout.backends import vllm_worker
from services.rollout.backends.vllm_worker import SextetWorker

LOGITS = torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 3.0]])
TOP_K = torch.tensor([3, 1, 3])
TEMPERATURES = torch.tensor([9.0, 0.5, 2.0])


class Seen(Exception):
    """The logits that log-probs would be made of."""


class Draws(vllms.Sampler):
    """vLLM's, with a draw that needs no kernel; what it hands on as processed is not to be looked at."""

    def __init__(self) -> None:
        self.logprobs_mode, self.compute_nans, self.trace_replay_state = "raw_logprobs", False, None
        self.return_sampling_mask = False
        self.sampling_states = SimpleNamespace(
            temperature=SimpleNamespace(gpu=TEMPERATURES),
            max_num_logprobs=lambda rows: 0,
            top_k=SimpleNamespace(np=TOP_K.numpy(), gpu=TOP_K),
        )
        self.logit_bias_state = SimpleNamespace(min_lens=SimpleNamespace(np=np.zeros(3, int)))
        self.logprob_token_ids_state = SimpleNamespace(max_num_token_ids=lambda rows: 0)

    def add_request(self, row: int, prompt: int, params: Any) -> None:
        self.logit_bias_state.min_lens.np[row] = prompt + params.min_tokens

    def sample(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The last of the most likely, as a seed might have it."""
        return logits.shape[-1] - 1 - logits.flip(-1).argmax(-1), logits.clone()


def worker_with(sampler: Draws | None) -> SextetWorker:
    worker = SextetWorker()
    worker.model_runner = SimpleNamespace(sampler=sampler)
    assert worker.sextet_setup() == "v2"
    return worker


def test_log_probs_are_made_of_logits_at_the_temperature(monkeypatch):
    def look(logits: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise Seen(logits.tolist())

    name = "compute_topk_scores" if hasattr(vllms, "compute_topk_scores") else "compute_topk_logprobs"
    monkeypatch.setattr(vllms, name, look)
    worker = worker_with(Draws())
    rows = torch.tensor([1, 2])
    batch = SimpleNamespace(
        expanded_idx_mapping=rows, idx_mapping=rows, idx_mapping_np=rows.numpy(), cu_num_logits_np=np.arange(3),
        expanded_local_pos=torch.zeros(2), positions=torch.zeros(2), logits_indices=torch.arange(2),
        input_ids=torch.zeros(2), seq_lens_cpu_upper_bound=torch.ones(2),
    )  # fmt: skip
    with pytest.raises(Seen) as seen:
        worker.model_runner.sampler(LOGITS, batch)
    assert seen.value.args == ([[2.0, 4.0, 8.0], [0.0, -0.5, 1.5]],)


def test_a_greedy_row_takes_the_first_of_equal_logits_whatever_its_seed():
    sampler = worker_with(Draws()).model_runner.sampler
    equal = torch.tensor([[1.0, 5.0, 5.0], [1.0, 5.0, 5.0]])
    sampled, _ = sampler.sample(equal, torch.tensor([1, 2]))
    assert sampled.tolist() == [1, 2], "greedy, and as it was drawn"


def test_so_it_is_with_the_first_model_runner(monkeypatch):
    def draw(self: Any, logits: torch.Tensor, metadata: Any) -> tuple[torch.Tensor, None]:
        logits /= 0.0
        return torch.tensor([2, 2], dtype=torch.int32), None

    monkeypatch.setattr(vllm_worker.Sampler, "sample", draw)
    sampler = object.__new__(vllm_worker.TemperedSampler)
    for top_k, wanted in ((torch.tensor([1, 3]), [1, 2]), (None, [2, 2])):
        equal = torch.tensor([[1.0, 5.0, 5.0], [1.0, 5.0, 5.0]])
        sampled, _ = sampler.sample(equal, SimpleNamespace(top_k=top_k))
        assert sampled.tolist() == wanted
        assert sampled.dtype == torch.int32


@pytest.mark.parametrize(("late", "length"), [(True, 14), (False, 15)])
def test_stops_are_forbidden_as_long_as_min_tokens_says(late, length, monkeypatch):
    monkeypatch.setattr(vllm_worker, "stops_are_late", lambda: late)
    sampler = worker_with(Draws()).model_runner.sampler
    sampler.add_request(1, 10, SimpleNamespace(min_tokens=5))
    assert sampler.logit_bias_state.min_lens.np.tolist() == [0, length, 0]


@pytest.mark.skipif(not vllm.__version__.startswith(("0.23.", "0.32.")), reason="not known of this version")
def test_which_vllm_is_late():
    assert vllm_worker.stops_are_late() == vllm.__version__.startswith("0.23.")


def test_a_stage_of_a_pipeline_that_does_not_sample_has_nothing_to_set_up():
    assert worker_with(None).model_runner.sampler is None
