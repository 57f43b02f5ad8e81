"""Adapters learn and nothing else does; outside of training they are merged."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.config import LoraConfig, ModelConfig, OptimizerConfig, TrainingConfig
from shared.places import Local
from shared.training import checkpoint
from shared.training.engine import Engine, map_rows
from shared.training.errors import ModelError
from shared.training.export import describe, export, weights_of
from shared.training.models import Policy, load_policy, load_value_model
from shared.training.parallel import ONE
from shared.training.saving import StateCopy
from shared.training.sequences import collate
from tests.unit.shared.training.test_training_engine import CPU, likelihood, make_block

CONFIG = TrainingConfig(
    optimizer=OptimizerConfig(lr=1e-2), lora=LoraConfig(rank=3, alpha=6, targets=("q_proj", "up_proj"))
)
BLOCK = make_block()


def make_engine(path: Path, seed: int = 5) -> Engine[Policy]:
    policy = load_policy(ModelConfig(path=str(path)), CONFIG, seed=seed)
    return Engine(policy, CONFIG, seed=3, norm_length=16)


def train(one: Engine[Policy], steps: int = 3) -> None:
    for step in range(steps):
        one.update(BLOCK, likelihood(one.model, "token-mean"), step=step)


def logprobs(policy: Policy) -> torch.Tensor:
    (column,) = map_rows(BLOCK, CONFIG, lambda micro: [policy(collate(micro, CPU), 1.0).logprobs_BT])
    return torch.from_numpy(column.data.copy())


def test_only_adapters_learn_and_an_untrained_policy_is_the_model(tiny_llama: Path) -> None:
    one, plain = make_engine(tiny_llama), load_policy(ModelConfig(path=str(tiny_llama)))
    assert torch.equal(logprobs(one.model), logprobs(plain))
    trained = {name for name, p in one.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2
    assert all(name.endswith(("lora_A", "lora_B")) for name in trained)
    train(one)
    assert {key.partition("/")[2] for key in one.optimizer.state()} == trained
    before = dict(plain.named_parameters())
    for name, p in one.model.named_parameters():
        assert name in trained or torch.equal(p, before[name])
    assert (logprobs(one.model) - logprobs(plain)).abs().max() > 1e-2
    facts = describe(one.model, ONE)
    assert int(facts["trained"]) == 2 * (3 * 32 + 32 * 3) + 2 * (3 * 32 + 64 * 3) < int(facts["parameters"])


def test_what_others_get_is_merged(tiny_llama: Path, tmp_path: Path) -> None:
    one = make_engine(tiny_llama)
    train(one)
    layer = one.model.lm.get_submodule("model.layers.1.mlp.up_proj")
    a, b, weights = layer.lora_A.double(), layer.lora_B.double(), weights_of(one.model)
    assert weights.keys() == AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict().keys()
    wanted = layer.weight.double() + 2 * torch.einsum("or,ri->oi", b, a)
    torch.testing.assert_close(weights["model.layers.1.mlp.up_proj.weight"].double(), wanted, rtol=0, atol=1e-6)
    export(one.model, AutoTokenizer.from_pretrained(tiny_llama), tmp_path / "merged")
    exported = load_policy(ModelConfig(path=str(tmp_path / "merged")))
    torch.testing.assert_close(logprobs(exported), logprobs(one.model), rtol=0, atol=1e-5)


def test_a_checkpoint_brings_adapters_back_bit_for_bit(tiny_llama: Path, tmp_path: Path) -> None:
    straight, first, second = make_engine(tiny_llama), make_engine(tiny_llama), make_engine(tiny_llama, seed=6)
    train(straight, 3)
    train(straight, 3)
    train(first, 3)
    StateCopy("actor").take(first.model, first.optimizer, {}).write(Local(tmp_path / "a"))
    checkpoint.load(Local(tmp_path / "a"), second.model, second.optimizer, role="actor")
    train(second, 3)
    assert all(map(torch.equal, straight.model.parameters(), second.model.parameters()))


def test_adapters_start_from_the_seed(tiny_llama: Path) -> None:
    def start(seed: int) -> torch.Tensor:
        return make_engine(tiny_llama, seed).model.lm.get_submodule("model.layers.0.self_attn.q_proj").lora_A

    assert torch.equal(start(5), start(5))
    assert not torch.equal(start(5), start(6))
    assert 0.1 < start(5).abs().max() <= 32**-0.5


def test_a_value_model_trains_its_head_and_adapters(tiny_llama: Path) -> None:
    model = load_value_model(ModelConfig(path=str(tiny_llama)), CONFIG)
    trained = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lora_A", "lora_B", "weight", "bias"}
    assert {name for name, p in model.named_parameters() if p.requires_grad and "lora" not in name} == {
        "head.weight",
        "head.bias",
    }


def test_an_unknown_layer_is_refused_by_name(tiny_llama: Path) -> None:
    config = TrainingConfig(lora=LoraConfig(targets=("q_proj", "query")))
    with pytest.raises(ModelError, match=r"^lora\.targets: no linear layer is called 'query'; there are down_proj,"):
        load_policy(ModelConfig(path=str(tiny_llama)), config)
