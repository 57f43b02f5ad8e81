"""Which logits vLLM makes log-probs of, by its second model runner, whose kernels run on GPUs only."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.v1.worker.gpu.sample import sampler as vllms

from services.rollout.backends.vllm_worker import SextetWorker

LOGITS = torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 3.0]])
TEMPERATURES = torch.tensor([9.0, 0.5, 2.0])


class Seen(Exception):
    """The logits that log-probs would be made of."""


class Draws(vllms.Sampler):
    """vLLM's, with a draw that needs no kernel; what it hands on as processed is not to be looked at."""

    def __init__(self) -> None:
        self.logprobs_mode, self.compute_nans, self.trace_replay_state = "raw_logprobs", False, None
        self.return_sampling_mask = False
        self.sampling_states = SimpleNamespace(
            temperature=SimpleNamespace(gpu=TEMPERATURES), max_num_logprobs=lambda rows: 0
        )
        self.logprob_token_ids_state = SimpleNamespace(max_num_token_ids=lambda rows: 0)

    def sample(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(-1), torch.full_like(logits, torch.nan)


def test_log_probs_are_made_of_logits_at_the_temperature(monkeypatch):
    def look(logits: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        raise Seen(logits.tolist())

    name = "compute_topk_scores" if hasattr(vllms, "compute_topk_scores") else "compute_topk_logprobs"
    monkeypatch.setattr(vllms, name, look)
    worker = SextetWorker()
    worker.model_runner = SimpleNamespace(sampler=Draws())
    assert worker.sextet_setup() == "v2"
    rows = torch.tensor([1, 2])
    batch = SimpleNamespace(
        expanded_idx_mapping=rows, idx_mapping=rows, idx_mapping_np=rows.numpy(), cu_num_logits_np=np.arange(3),
        expanded_local_pos=torch.zeros(2), positions=torch.zeros(2), logits_indices=torch.arange(2),
        input_ids=torch.zeros(2), seq_lens_cpu_upper_bound=torch.ones(2),
    )  # fmt: skip
    with pytest.raises(Seen) as seen:
        worker.model_runner.sampler(LOGITS, batch)
    assert seen.value.args == ([[2.0, 4.0, 8.0], [0.0, -0.5, 1.5]],)
