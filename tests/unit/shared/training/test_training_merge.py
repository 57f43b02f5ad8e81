"""Adapters that arrive beside a frozen model, added up by who receives them."""

import pytest
import torch

from shared.training.errors import ModelError
from shared.training.lora import merge_adapters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_made_in_the_dtype_of_the_adapters(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, b, a = torch.randn(6, 5).to(dtype), torch.randn(6, 2), torch.randn(2, 5)
    found = merge_adapters({"m.q.weight": weight, "m.q.lora_B": b, "m.q.lora_A": a, "m.norm": weight[0]})
    expected = weight.double() + b.double() @ a.double()
    assert list(found) == ["m.q.weight", "m.norm"]
    assert found["m.q.weight"].dtype == dtype
    torch.testing.assert_close(found["m.q.weight"].double(), expected.to(dtype).double(), rtol=0, atol=1e-5)
    assert torch.equal(found["m.norm"], weight[0])


@pytest.mark.parametrize(
    "tensors",
    [
        {"q.lora_B": torch.zeros(6, 2), "q.lora_A": torch.zeros(2, 5)},
        {"q.weight": torch.zeros(6, 5), "q.lora_B": torch.zeros(6, 2)},
        {"q.weight": torch.zeros(6, 5), "q.lora_B": torch.zeros(6, 2), "q.lora_A": torch.zeros(3, 5)},
        {"q.weight": torch.zeros(6, 5), "q.lora_B": torch.zeros(1, 2), "q.lora_A": torch.zeros(2, 5)},
    ],
)
def test_an_adapter_that_fits_nothing_is_named(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ModelError, match=r"'q\.lora_B' fits no weight"):
        merge_adapters(tensors)
