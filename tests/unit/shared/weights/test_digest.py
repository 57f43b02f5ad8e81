import pytest
import torch

from shared.weights import digest

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_a_digest_is_that_of_the_bytes(dtype, shape):
    tensor = (torch.arange(6)[: torch.Size(shape).numel()] % 2).reshape(shape).to(dtype)
    assert len(digest.raw_bytes(tensor)) == tensor.nbytes
    assert digest.tensor_digest(tensor) == digest.tensor_digest(tensor.clone())


def test_layout_in_memory_does_not_matter():
    tensor = torch.randn(4, 6)
    assert digest.tensor_digest(tensor.t()) == digest.tensor_digest(tensor.t().contiguous())
    assert digest.tensor_digest(tensor[:, ::2]) == digest.tensor_digest(tensor[:, ::2].clone())


def test_writing_to_the_bytes_writes_the_tensor():
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    digest.raw_bytes(tensor)[:] = digest.raw_bytes(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert tensor.tolist() == [1.5, -2.0]


def test_one_bit_changes_the_digest_of_the_version():
    state = {"a": torch.randn(5), "b": torch.randn(5)}
    changed = {"a": state["a"].clone(), "b": state["b"]}
    digest.raw_bytes(changed["a"])[0] ^= 1
    assert digest.state_digest(changed) != digest.state_digest(state)


def test_names_shapes_and_dtypes_count_and_order_does_not():
    a, b = torch.zeros(4), torch.ones(4)
    base = digest.state_digest({"a": a, "b": b})
    assert digest.state_digest({"b": b, "a": a}) == base
    for other in (
        {"a": b, "b": a},
        {"a": a, "c": b},
        {"a": a.reshape(2, 2), "b": b},
        {"a": a.int(), "b": b},
        {"a": a},
    ):
        assert digest.state_digest(other) != base


def test_tied_means_the_very_same_tensor():
    base = torch.randn(4, 4)
    state = {
        "embed": base,
        "head": base,
        "same_view": base.view(4, 4),
        "part": base[:2],
        "transposed": base.t(),
        "as_int": base.view(torch.int32),
        "copy": base.clone(),
        "no_elements": base[:0],
        "none_either": base[:0],
    }
    assert digest.tied(state) == {"head": "embed", "same_view": "embed"}
