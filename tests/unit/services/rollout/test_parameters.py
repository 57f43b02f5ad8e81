"""Weights into a model: ties stay, nothing is copied needlessly, nothing half-fits."""

import pytest
import torch

from services.rollout.backend import EngineError
from services.rollout.backends.parameters import stage, swap
from tests.fakes.rollout import tiny_model

IDS = torch.arange(4, 10)[None]


def _moved(model):
    return {name: tensor + 0.1 for name, tensor in model.state_dict().items()}


def test_swapped_weights_are_the_models_and_ties_stay():
    model, wanted = tiny_model("llama", 0), tiny_model("llama", 1)
    swap(model, stage(model, wanted.state_dict()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_name_of_a_tie_is_enough(left_out):
    model, wanted = tiny_model("llama", 0), tiny_model("llama", 1)
    swap(model, stage(model, {name: t for name, t in wanted.state_dict().items() if name != left_out}))
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)


def test_names_that_are_tied_must_agree():
    model = tiny_model("llama")
    with pytest.raises(EngineError, match=r"embed_tokens.weight and lm_head.weight are tied"):
        stage(model, {**_moved(model), "lm_head.weight": torch.zeros(64, 32)})


def test_staging_changes_nothing_and_copies_nothing():
    model = tiny_model("qwen2")
    before, tensors = model(IDS).logits, _moved(model)
    staged = stage(model, tensors)
    assert torch.equal(model(IDS).logits, before)
    assert staged["model.norm.weight"].data_ptr() == tensors["model.norm.weight"].data_ptr()


def test_the_models_dtype_is_kept():
    model = tiny_model("llama").to(torch.bfloat16)
    swap(model, stage(model, tiny_model("llama", 1).state_dict()))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
