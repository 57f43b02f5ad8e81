import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.batch import tensors
from shared.batch.block import Ragged

torch.set_num_threads(1)
int_rows = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=5)


def test_padded_on_the_right():
    ragged = Ragged.from_rows([[1, 2], [], [3]], "int32")
    assert tensors.padded(ragged, pad=9).tolist() == [[1, 2], [9, 9], [3, 9]]
    assert tensors.padded(ragged, width=3).tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0]]
    assert tensors.padding_mask(ragged).tolist() == [[True, True], [False, False], [True, False]]
    assert tensors.lengths(ragged).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("dtype", "expected"), [("int32", torch.int64), ("float32", torch.float32), ("uint8", torch.uint8)]
)
def test_dtypes(dtype, expected):
    assert tensors.padded(Ragged.from_rows([[1]], dtype)).dtype == expected
    assert tensors.scalars(Ragged.from_rows([[1]], dtype)).dtype == expected


@given(int_rows)
def test_round_trip_of_ids(rows):
    ragged = Ragged.from_rows([np.array(row) for row in rows], "int32")
    assert tensors.ragged_from_padded(tensors.padded(ragged), ragged.lengths) == ragged


@given(st.lists(st.lists(st.floats(width=32), max_size=5), max_size=5), st.integers(0, 3))
def test_round_trip_of_floats_in_any_width(rows, extra):
    ragged = Ragged.from_rows([np.array(row) for row in rows], "float32")
    width = max(map(len, rows), default=0) + extra
    t_BT = tensors.padded(ragged, pad=float("nan"), width=width)
    assert t_BT.shape == (len(rows), width)
    assert tensors.ragged_from_padded(t_BT, tensors.lengths(ragged)) == ragged


def test_what_torch_computes_becomes_a_column():
    assert tensors.ragged_from_padded(torch.tensor([[True, False]]), torch.tensor([2])).dtype == "uint8"
    assert tensors.ragged_from_padded(torch.ones(1, 2).double().requires_grad_(), torch.tensor([1])).dtype == "float32"
    assert tensors.ragged_from_padded(torch.ones(1, 2).bfloat16(), torch.tensor([1])).dtype == "float32"
    assert tensors.ragged_from_scalars(torch.tensor([1.5, 2.5])).scalars().tolist() == [1.5, 2.5]


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 elements does not fit into 2"):
        tensors.padded(Ragged.from_rows([[1, 2, 3]], "int32"), width=2)
    with pytest.raises(ValueError, match="do not fit into T=2"):
        tensors.ragged_from_padded(torch.zeros(1, 2), torch.tensor([3]))
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        tensors.ragged_from_padded(torch.zeros(2, 2), torch.tensor([1]))


def test_a_padded_tensor_is_its_own_copy():
    """Training may write to it; the block stays as it is."""
    ragged = Ragged.from_rows([[1.0, 2.0]], "float32")
    tensors.padded(ragged).zero_()
    tensors.scalars(Ragged.from_scalars([1.0], "float32")).zero_()
    assert ragged.data.tolist() == [1.0, 2.0]
