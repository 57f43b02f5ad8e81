"""Log-probs, entropy and values against a plain float64 loop over the Hugging Face model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from shared.batch.block import Block, Ragged, RowKey
from shared.config import ModelConfig, TrainingConfig
from shared.training import logprobs
from shared.training.engine import map_rows
from shared.training.models import load_policy, load_value_model
from shared.training.sequences import collate

CPU = torch.device("cpu")


def make_block(seed: int = 0, lengths: tuple[tuple[int, int], ...] = ((3, 5), (7, 1), (1, 9), (4, 0), (2, 4))) -> Block:
    rng = np.random.default_rng(seed)
    ids = [(rng.integers(0, 64, prompt), rng.integers(0, 64, response)) for prompt, response in lengths]
    columns = {
        "prompt_ids": Ragged.from_rows([prompt for prompt, _ in ids], "int32"),
        "response_ids": Ragged.from_rows([response for _, response in ids], "int32"),
    }
    return Block(tuple(RowKey(f"1:{index}:0", 0) for index in range(len(ids))), columns)


def reference(path: Path, block: Block, temperature: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """One row at a time, no padding, full logits, float64."""
    lm = AutoModelForCausalLM.from_pretrained(path).double()
    logprobs_rows, entropy_rows = [], []
    for prompt, response in zip(block["prompt_ids"].rows(), block["response_ids"].rows(), strict=True):
        ids = torch.tensor(np.concatenate([prompt, response])).long()
        with torch.no_grad():
            logits = lm(ids[None]).logits[0] / temperature
        chosen, entropies = [], []
        for t in range(len(response)):
            distribution = torch.softmax(logits[len(prompt) + t - 1], -1)
            chosen.append(float(distribution[response[t]].log()))
            entropies.append(float(-(distribution * distribution.log()).sum()))
        logprobs_rows.append(np.array(chosen))
        entropy_rows.append(np.array(entropies))
    return logprobs_rows, entropy_rows


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("chunk_elements", [1, 64 * 3, 2**24])
def test_equal_to_a_float64_loop(
    tiny_llama: Path, temperature: float, size: int, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.training.models.CHUNK_ELEMENTS", chunk_elements)
    block, policy = make_block(), load_policy(ModelConfig(path=str(tiny_llama)))

    def compute(micro: Block) -> tuple[torch.Tensor, torch.Tensor]:
        scores = policy(collate(micro, CPU), temperature)
        return scores.logprobs_BT, scores.entropy_BT

    got_logprobs, got_entropy = map_rows(block, TrainingConfig(micro_batch_size=size), compute)
    want_logprobs, want_entropy = reference(tiny_llama, block, temperature)
    for got, want in zip([*got_logprobs.rows(), *got_entropy.rows()], [*want_logprobs, *want_entropy], strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_the_padding_token_is_an_ordinary_token(tiny_llama: Path) -> None:
    """Id 0 fills the padding; a response full of zeros is scored like any other."""
    columns = {
        "prompt_ids": Ragged.from_rows([[0, 0], [5, 6, 7, 8]], "int32"),
        "response_ids": Ragged.from_rows([[0, 0, 0], [0, 9, 0, 0, 0]], "int32"),
    }
    block = Block((RowKey("a", 0), RowKey("b", 0)), columns)
    policy = load_policy(ModelConfig(path=str(tiny_llama)))
    (got,) = map_rows(
        block, TrainingConfig(micro_batch_size=2), lambda micro: [policy(collate(micro, CPU), 1.0).logprobs_BT]
    )
    for row, want in zip(got.rows(), reference(tiny_llama, block, 1.0)[0], strict=True):
        np.testing.assert_allclose(row, want, atol=2e-5)


def test_gradients_do_not_depend_on_the_chunk(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for elements in (1, 64 * 2, 2**24):
        monkeypatch.setattr("shared.training.models.CHUNK_ELEMENTS", elements)
        policy = load_policy(ModelConfig(path=str(tiny_llama))).double()
        scores = policy(collate(make_block(), CPU), 0.9, entropy_gradient=True)
        (scores.logprobs_BT.sum() + 0.1 * scores.entropy_BT.sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    assert len(gradients[0]) == sum(p.numel() for p in policy.parameters())
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-9, atol=1e-12)


def test_logits_of_prompts_never_exist(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, seen = load_policy(ModelConfig(path=str(tiny_llama))), []
    policy.lm.get_output_embeddings().register_forward_hook(lambda _m, _i, logits: seen.append(logits.shape))
    monkeypatch.setattr("shared.training.models.CHUNK_ELEMENTS", 64 * 4)
    policy(collate(make_block(), CPU), 1.0)
    assert sum(rows for rows, _ in seen) == 5 + 1 + 9 + 0 + 4
    assert max(rows for rows, _ in seen) <= 4


class Largest(TorchDispatchMode):
    """The most elements that any tensor has had that was made inside."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_all_logits_never_exist_and_none_wait_for_the_backward_pass(entropy_gradient: bool) -> None:
    tokens, width, words, chunk, saved = 512, 4, 256, 16, []
    rng = torch.Generator().manual_seed(0)
    head = nn.Linear(width, words)
    hidden_ND = torch.randn(tokens, width, generator=rng, requires_grad=True)
    ids_BT = torch.randint(0, words, (1, tokens), generator=rng)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            scores = logprobs.score_tokens(
                hidden_ND, ids_BT, ids_BT >= 0, head, head, 0.7, chunk=chunk, entropy_gradient=entropy_gradient
            )
        kept = sum(saved)
        (scores.logprobs_BT.sum() + (scores.entropy_BT.sum() if entropy_gradient else 0)).backward()
    assert largest.elements == chunk * words < tokens * words / 30
    assert kept < 8 * tokens * width, "hidden states and what is as long as them, no logits"


@pytest.mark.parametrize("chunk", [4, 512])
def test_the_heads_gradient_is_summed_in_float32(chunk: int) -> None:
    """Summed in bfloat16 over 128 chunks it would be off by ten times as much as over one."""
    gradients, rng = [], torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(512, 16, generator=rng)
    ids_BT = torch.randint(0, 64, (1, 512), generator=rng)
    head = nn.Linear(16, 64, bias=False)
    nn.init.normal_(head.weight, generator=rng)
    for half in (False, True):
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            scores = logprobs.score_tokens(hidden_ND, ids_BT, ids_BT >= 0, head, head, 1.0, chunk=chunk)
        scores.logprobs_BT.mean().backward()
        gradients.append(head.weight.grad.clone())
    assert 0 < torch.linalg.norm(gradients[1] - gradients[0]) < 0.006 * torch.linalg.norm(gradients[0])


def test_entropy_takes_part_in_the_loss_only_when_asked(tiny_llama: Path) -> None:
    policy = load_policy(ModelConfig(path=str(tiny_llama)))
    assert not policy(collate(make_block(), CPU), 1.0).entropy_BT.requires_grad
    assert policy(collate(make_block(), CPU), 1.0, entropy_gradient=True).entropy_BT.requires_grad


def test_ruled_out_words_do_not_poison_the_entropy() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    scores = logprobs.score_tokens(
        logits,
        torch.zeros(1, 1).long(),
        torch.ones(1, 1).bool(),
        nn.Identity(),
        nn.Identity(),
        1.0,
        chunk=8,
        entropy_gradient=True,
    )
    assert scores.entropy_BT.item() == pytest.approx(np.log(2))
    scores.entropy_BT.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_a_value_is_that_of_the_state_before_the_token(tiny_llama: Path) -> None:
    """Value t must not see response token t: changing token t and all later ones changes values after t only."""
    model = load_value_model(ModelConfig(path=str(tiny_llama)))
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    block = make_block(lengths=((3, 6),))
    (before,) = map_rows(block, TrainingConfig(micro_batch_size=1), lambda micro: [model(collate(micro, CPU))])
    changed = block["response_ids"].rows()[0].copy()
    changed[2:] = (changed[2:] + 1) % 64
    other = Block(block.rows, {**block.columns, "response_ids": Ragged.from_rows([changed], "int32")})
    (after,) = map_rows(other, TrainingConfig(micro_batch_size=1), lambda micro: [model(collate(micro, CPU))])
    np.testing.assert_allclose(after.data[:3], before.data[:3], atol=1e-6)
    assert (np.abs(after.data[3:] - before.data[3:]) > 1e-4).all()


def test_a_new_value_model_says_zero(tiny_llama: Path) -> None:
    model = load_value_model(ModelConfig(path=str(tiny_llama)))
    assert (model(collate(make_block(), CPU)) == 0).all()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="1:1:0#0 has an empty prompt"):
        collate(make_block(lengths=((3, 2), (0, 2))), CPU)


def test_bfloat16_computes_over_float32_parameters(tiny_llama: Path) -> None:
    policy = load_policy(ModelConfig(path=str(tiny_llama), dtype="bfloat16"))
    exact = load_policy(ModelConfig(path=str(tiny_llama)))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    got, want = (model(collate(make_block(), CPU), 1.0).logprobs_BT for model in (policy, exact))
    assert got.dtype == torch.float32
    assert 0 < (got - want).abs().max() < 0.5
