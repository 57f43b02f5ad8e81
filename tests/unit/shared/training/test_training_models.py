"""Any Hugging Face causal language model; clear words for those that can't be used."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from shared.config import ModelConfig, TrainingConfig
from shared.training.errors import ModelError
from shared.training.export import describe
from shared.training.group import Group
from shared.training.models import load_policy, load_value_model
from shared.training.parallel import ONE, Parallel
from shared.training.sequences import collate
from tests.unit.shared.training.test_training_logprobs import CPU, make_block, reference

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2}  # fmt: skip
FAMILIES: dict[str, PreTrainedModel] = {
    "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "gpt2": GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=128, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5)
    ),
    "gemma2": Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)),
    "granite": GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_families(family: str, checkpointing: bool, tmp_path: Path) -> None:
    """Also with dropout in the configuration: gradient checkpointing needs training mode, which would turn it on."""
    FAMILIES[family].save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path)), TrainingConfig(gradient_checkpointing=checkpointing))
    block = make_block()
    got_BT = policy(collate(block, CPU), 1.0).logprobs_BT
    for row, want in enumerate(reference(tmp_path, block, 1.0)[0]):
        torch.testing.assert_close(
            got_BT[row, : len(want)].double(), torch.from_numpy(want).double(), rtol=0, atol=3e-5
        )
    got_BT.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in policy.parameters())


def test_gradient_checkpointing_changes_no_gradient(tiny_llama: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = load_policy(ModelConfig(path=str(tiny_llama)), TrainingConfig(gradient_checkpointing=checkpointing))
        policy(collate(make_block(), CPU), 1.0).logprobs_BT.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_value_model_has_no_language_head_and_trains_its_body(tiny_llama: Path) -> None:
    model = load_value_model(ModelConfig(path=str(tiny_llama)))
    assert sum(p.numel() for p in model.head.parameters()) == 33
    torch.nn.init.ones_(model.head.weight)
    model(collate(make_block(), CPU)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("path", ["/no/such/place", "./not-here", "a/b/c"])
def test_a_missing_directory_is_named(path: str) -> None:
    with pytest.raises(ModelError, match=rf"^model\.path: there is no directory '{path}'$"):
        load_policy(ModelConfig(path=path))


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^critic\.model\.path: .*holds no usable model"):
        load_value_model(ModelConfig(path=str(tmp_path)), key="critic.model")


def test_an_unknown_hub_id_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"^model\.path: 'nobody/nothing' is neither a directory nor a hub model"):
        load_policy(ModelConfig(path="nobody/nothing"))


def test_pickled_weights_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="holds no usable model"):
        load_policy(ModelConfig(path=str(tmp_path)))


def test_an_unknown_device_is_named(tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.device: 'cuda:77' is not here"):
        load_policy(ModelConfig(path=str(tiny_llama), device="cuda:77"))
    with pytest.raises(ValueError, match=r"model\.device: 'gpu' is not a device"):
        load_policy(ModelConfig(path=str(tiny_llama), device="gpu"))


def test_devices_of_all_ranks_are_told(tiny_llama: Path) -> None:
    class Two(Group):
        def exchange(self, value: Any) -> list[Any]:
            return [value, "cuda:1"]

    policy = load_policy(ModelConfig(path=str(tiny_llama)))
    assert describe(policy, Parallel(Two(0, 2), shards=2))["device"] == "cpu, cuda:1"
    assert describe(policy, ONE)["device"] == "cpu"
