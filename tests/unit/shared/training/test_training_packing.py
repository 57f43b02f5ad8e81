"""Rows one after another give what rows side by side give; families that can't do that are padded, and say why."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from shared.config import ModelConfig, OptimizerConfig, TrainingConfig
from shared.training import attention
from shared.training.engine import Engine, map_rows
from shared.training.scorer import Scorer
from shared.training.sequences import collate
from shared.training.sharding import load_policy, load_value_model
from tests.unit.shared.training.test_training_engine import CPU, likelihood, make_block
from tests.unit.shared.training.test_training_sharded import loss_of, score

BLOCK = make_block(9)
DECODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
PACKED: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**DECODER),
    "a window shorter than rows": MistralConfig(**DECODER, sliding_window=4),
    "qwen3": Qwen3Config(**DECODER),
    "experts": Qwen3MoeConfig(**DECODER, **EXPERTS),
    "learned positions": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32),
}
PADDED: dict[str, tuple[PretrainedConfig, str]] = {
    "gemma2": (Gemma2Config(**DECODER), "gemma2: its attention wants softcap"),
    "bloom": (BloomConfig(vocab_size=64, hidden_size=32, n_head=4), "bloom models bring their own attention"),
}


def write(config: PretrainedConfig, directory: Path) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


def training(packing: bool, **options: object) -> TrainingConfig:
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-4, weight_decay=0.1, clip_grad=0.5)
    return TrainingConfig(optimizer=optimizer, mini_batch_size=5, packing=packing, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", PACKED)
def test_packed_and_padded_are_the_same(tmp_path: Path, family: str) -> None:
    """Log-probs and all parameters after an update, against one padded row at a time."""
    path, results = write(PACKED[family], tmp_path), []
    for config in (training(False, micro_batch_size=1), training(True), training(True, gradient_checkpointing=True)):
        policy = load_policy(ModelConfig(path=path), config)
        assert (policy.padded == "") is config.packing
        engine = Engine(policy, config, seed=3, norm_length=16)
        (logprobs,) = map_rows(BLOCK, config, partial(score, policy))
        engine.update(BLOCK, likelihood(policy, "token-mean"), step=1)
        results.append([torch.from_numpy(logprobs.data.copy()), *(p.detach() for p in policy.parameters())])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_values_are_the_same(tiny_llama: Path) -> None:
    results = []
    for config in (training(False), training(True)):
        model = load_value_model(ModelConfig(path=str(tiny_llama)), config)
        Engine(model, config, seed=3, norm_length=16).update(BLOCK, loss_of(model), step=1)
        (values,) = map_rows(BLOCK, config, partial(score, model))
        results.append([torch.from_numpy(values.data.copy()), *(p.detach() for p in model.parameters())])
    assert results[0][0].abs().max() > 1e-4
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", PADDED)
def test_what_cannot_be_packed_is_padded_and_says_why(tmp_path: Path, family: str) -> None:
    config, why = PADDED[family]
    path = ModelConfig(path=write(config, tmp_path))
    policy, plain = load_policy(path, training(True)), load_policy(path)
    assert policy.padded == why
    got, want = (model(collate(BLOCK, CPU), 1.0).logprobs_BT for model in (policy, plain))
    assert torch.equal(got, want)


def test_a_model_whose_rows_feel_each_other_is_padded(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one would whose layers mix tokens in a way of their own."""
    plain = Scorer._hidden
    monkeypatch.setattr(Scorer, "_hidden", lambda *args, **options: plain(*args, **options).cumsum(0))
    policy = load_policy(ModelConfig(path=str(tiny_llama)), training(True))
    assert policy.padded == "tokens of llama models meet outside of their attention"


def test_no_padding_is_computed(tiny_llama: Path) -> None:
    policy, seen = load_policy(ModelConfig(path=str(tiny_llama)), training(True)), []
    policy.lm.get_input_embeddings().register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].numel()))
    sequences = collate(BLOCK, CPU)
    policy(sequences, 1.0)
    assert (
        seen == [sum(sequences.lengths)] == [int(sequences.attention_mask_BS.sum())] != [sequences.input_ids_BS.numel()]
    )


def test_in_half_precision_the_kernel_for_all_rows_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(attention, "_has_kernel", lambda *tensors: bool(asked.extend(t.dtype for t in tensors)))
    policy = load_policy(
        ModelConfig(path=write(PACKED["llama"], tmp_path), dtype="bfloat16", device="cpu"), training(True)
    )
    policy(collate(BLOCK, torch.device("cpu")), 1.0)
    # Whether the model can be packed was tried before, in float32.
    asked.clear()
    policy(collate(BLOCK, torch.device("cpu")), 1.0)
    assert asked
    assert set(asked) == {torch.bfloat16}


@pytest.mark.gpu
def test_on_a_gpu_in_half_precision_packed_and_padded_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for all rows at once, with fewer key heads than heads, and with a window."""
    at_once, kernel = [], attention.varlen_attn
    monkeypatch.setattr(attention, "varlen_attn", lambda *args, **names: (at_once.append(1), kernel(*args, **names))[1])
    for number, config in enumerate((PACKED["llama"], PACKED["a window shorter than rows"])):
        path = ModelConfig(path=write(config, tmp_path / str(number)), dtype="bfloat16", device="cuda")
        results = []
        for packing in (False, True):
            policy = load_policy(path, training(packing))
            scores = policy(collate(BLOCK, torch.device("cuda")), 1.0)
            scores.logprobs_BT.sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
            results.append((scores.logprobs_BT.detach(), gradient))
        (logprobs, gradient), (packed_logprobs, packed_gradient) = results
        assert at_once
        at_once.clear()
        assert (logprobs - packed_logprobs).abs().max() < 0.2
        assert torch.linalg.norm(gradient - packed_gradient) < 0.05 * torch.linalg.norm(gradient)
