"""Sums against a plain loop over Python integers, and what a digest by shards needs of them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.weights import sums
from shared.weights.digest import raw_bytes, sums_digest, tensor_digest

torch.set_num_threads(1)
MASK = 2**64 - 1


def mixed(number: int) -> int:
    z = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def by_loop(tensor: torch.Tensor) -> list[int]:
    """The definition, written down a second time."""
    data = bytes(raw_bytes(tensor))
    width = (tensor.shape[-1] if tensor.ndim else 1) * tensor.element_size()
    blocks = -(-width // 65536)
    totals = [0] * 8
    for place, byte in enumerate(data):
        row, column = divmod(place, width)
        a = mixed(row * blocks + column // 65536) | 1
        for k in range(8):
            b = ((mixed(k * 65536 + column % 65536) & 0xFF) - 128) | 1
            totals[k] += a * b * (byte - 256 if byte > 127 else byte)
    return [(t + 2**63) % 2**64 - 2**63 for t in totals]


def whole(tensor: torch.Tensor) -> list[int]:
    return sums.box_sums(tensor, (0,) * tensor.ndim, tensor.shape).tolist()


@pytest.mark.parametrize("shape", [(), (5,), (40,), (3, 7), (33, 4), (2, 3, 5), (1, 17000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_sums_are_the_definition(shape, dtype):
    tensor = (torch.randn(shape) * 100).to(dtype)
    assert whole(tensor) == by_loop(tensor)


@pytest.mark.parametrize("product", [sums._int8_dots, sums._float_dots])
@pytest.mark.parametrize(
    ("rows", "width", "place"), [(1, 65_536, 0), (3, 5_000, 17), (700, 1_024, 0), (40, 1_023, 64_513), (2, 1, 9)]
)
def test_both_products_are_exact(product, rows, width, place):
    columns_KC = sums._columns(torch.device("cpu"))[:, place : place + width].long()
    for low, high in ((-128, 127), (-128, -128), (127, 127)):
        rows_RC = torch.randint(low, high + 1, (rows, width), dtype=torch.int8)
        assert torch.equal(product(rows_RC, place).long(), rows_RC.long() @ columns_KC.t())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_add_up_however_a_tensor_is_cut(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    tensor = torch.randn(shape).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8])))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[dim], *data.draw(st.lists(st.integers(0, shape[dim]), max_size=3))})
    total = torch.zeros(8, dtype=torch.int64)
    for begin, end in itertools.pairwise(cuts):
        start = tuple(begin if d == dim else 0 for d in range(len(shape)))
        total += sums.box_sums(tensor.narrow(dim, begin, end - begin), start, shape)
    assert sums_digest(total.tolist()) == tensor_digest(tensor)


def test_pieces_add_up_across_blocks_of_columns():
    tensor = torch.randn(3, 40_000)
    left, right = (
        sums.box_sums(part, (0, at), tensor.shape)
        for part, at in ((tensor[:, :20_001], 0), (tensor[:, 20_001:], 20_001))
    )
    assert (left + right).tolist() == whole(tensor)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 199), st.integers(1, 255))
def test_any_changed_byte_changes_all_sums(place, change):
    tensor = torch.randn(5, 10)
    other = tensor.clone()
    raw_bytes(other)[place] = raw_bytes(other)[place] ^ change
    assert all(a != b for a, b in zip(whole(tensor), whole(other), strict=True))


def test_places_count():
    tensor = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    for other in (tensor.t(), tensor.flip(0), tensor.flip(1), tensor.roll(1, 0), tensor[[1, 0, *range(2, 8)]]):
        assert whole(other) != whole(tensor)


def test_a_device_without_the_int8_product_gets_the_same_numbers(monkeypatch):
    tensor = torch.randn(40, 24)
    expected = whole(tensor)

    def refuse(*_):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    assert whole(tensor) == expected
