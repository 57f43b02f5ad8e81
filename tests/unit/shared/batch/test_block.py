import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.batch.block import Block, Ragged, RowKey
from tests.fakes.blocks import blocks, samples

A, B, C = RowKey("a", 0), RowKey("a", 1), RowKey("b", 0)


def test_rows_keep_their_lengths_and_order():
    ragged = Ragged.from_rows([[1, 2], [], [3]], "int32")
    assert [row.tolist() for row in ragged.rows()] == [[1, 2], [], [3]]
    assert (len(ragged), ragged.dtype, ragged.nbytes) == (3, "int32", 12 + 12)


@given(st.lists(st.text()))
def test_text_round_trip(texts):
    assert Ragged.from_text(texts).texts() == texts


def test_a_lone_surrogate_is_replaced_and_no_error():
    assert Ragged.from_text(["a\ud800b"]).texts()[0].replace("\ufffd", "") == "ab"


def test_int32_data_of_no_rows():
    empty = Ragged.from_rows([], "int32")
    assert (len(empty), empty.data.dtype, empty.rows()) == (0, np.int32, [])


@pytest.mark.parametrize(
    ("data", "lengths", "says"),
    [
        (np.zeros(3, np.float64), np.array([3], np.uint32), "float64"),
        (np.zeros((1, 3), np.float32), np.array([3], np.uint32), "flat"),
        (np.zeros(3, np.float32), np.array([3]), "uint32"),
        (np.zeros(3, np.float32), np.array([2], np.uint32), "add up to 2, but 3"),
        # Lengths whose sum wraps around in 32 bits.
        (np.zeros(0, np.float32), np.array([2**31, 2**31], np.uint32), "add up to 4294967296"),
    ],
)
def test_malformed_columns_are_refused(data, lengths, says):
    with pytest.raises(ValueError, match=says):
        Ragged(data, lengths)


def test_text_must_be_bytes():
    with pytest.raises(ValueError, match="text"):
        Ragged(np.zeros(3, np.int32), np.array([3], np.uint32), text=True)


def test_scalars_of_a_ragged_column_are_refused():
    assert Ragged.from_scalars([1.5, 2.5], "float32").scalars().tolist() == [1.5, 2.5]
    with pytest.raises(ValueError, match="scalar"):
        Ragged.from_rows([[1, 2], []], "int32").scalars()


def test_equality_is_by_bits():
    nan = Ragged.from_scalars([float("nan")], "float32")
    assert nan == Ragged.from_scalars([float("nan")], "float32")
    assert Ragged.from_scalars([0.0], "float32") != Ragged.from_scalars([-0.0], "float32")
    assert Ragged.from_rows([[65]], "uint8") != Ragged.from_text(["A"])


def test_columns_are_read_only():
    """The store and its local readers share them."""
    source = np.arange(3, dtype=np.int32)
    ragged = Ragged(source, np.array([3], np.uint32))
    with pytest.raises(ValueError, match="read-only"):
        ragged.data[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        ragged.rows()[0][0] = 9


def test_doubled_rows_are_named():
    with pytest.raises(ValueError, match="row a#1 is twice"):
        Block((A, B, C, B), {})


def test_a_column_of_other_length_is_named():
    with pytest.raises(ValueError, match="'score' has 1 rows, the block 2"):
        Block((A, B), {"score": Ragged.from_scalars([1], "float32")})


@pytest.mark.parametrize("name", ["score", "score/format"])
def test_a_known_column_of_other_type_is_named(name):
    with pytest.raises(ValueError, match=f"'{name}' is int32, not float32"):
        Block((A,), {name: Ragged.from_scalars([1], "int32")})


def test_select_rows_and_columns_in_the_wanted_order():
    block = samples(4)
    rows = (block.rows[3], block.rows[0])
    picked = block.select(rows, ["response", "response_ids"])
    assert picked.rows == rows
    assert list(picked.columns) == ["response", "response_ids"]
    assert picked["response"].texts() == [block["response"].texts()[3], block["response"].texts()[0]]
    assert picked["response_ids"].rows()[0].tolist() == block["response_ids"].rows()[3].tolist()


@given(blocks(), st.data())
def test_select_is_what_row_wise_picking_gives(block, data):
    rows = data.draw(st.lists(st.sampled_from(block.rows), unique=True) if block.rows else st.just([]))
    picked = block.select(rows)
    where = [block.rows.index(row) for row in rows]
    for name, column in block.columns.items():
        assert [r.tobytes() for r in picked[name].rows()] == [column.rows()[i].tobytes() for i in where]
        assert picked[name].dtype == column.dtype


def test_the_whole_block_is_itself_and_its_digest_is_made_once():
    block = samples(4)
    assert block.select(block.rows, list(block.columns)) is block
    assert block.select(None, list(block.columns)[::-1]).digest() != block.digest()


def test_selecting_what_is_not_there_is_named():
    block = samples(2)
    with pytest.raises(KeyError, match="no rows zz#0"):
        block.select([RowKey("zz", 0)])
    with pytest.raises(KeyError, match="no column 'scor'; the block has response_ids"):
        block.select(None, ["scor"])


def test_digest_depends_on_everything():
    base = Block((A, B), {"x": Ragged.from_rows([[1], [2, 3]], "int32")})
    others = [
        Block((A, C), base.columns),
        Block((B, A), base.columns),
        Block((A, B), {"y": base["x"]}),
        Block((A, B), {"x": Ragged.from_rows([[1, 2], [3]], "int32")}),
        Block((A, B), {"x": Ragged.from_rows([[1], [2, 4]], "int32")}),
        Block((A, B), {"x": Ragged(base["x"].data.view(np.float32), base["x"].lengths)}),
        Block((A, B), {}),
    ]
    assert len({block.digest() for block in [base, *others]}) == len(others) + 1
    assert base.digest() == Block((A, B), {"x": Ragged.from_rows([[1], [2, 3]], "int32")}).digest()


def test_text_and_bytes_of_the_same_content_have_other_digests():
    assert (
        Block((A,), {"x": Ragged.from_text(["A"])}).digest()
        != Block((A,), {"x": Ragged.from_rows([[65]], "uint8")}).digest()
    )


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("shared.batch.columns", ("numpy", "torch", "google.protobuf", "grpc")),
        ("shared.batch.block", ("torch", "google.protobuf", "grpc")),
        ("shared.batch.refs", ("numpy", "torch")),
        ("shared.batch.reader", ("torch",)),
        ("shared.config_loading", ("numpy", "torch", "grpc")),
        ("shared.seeds", ("numpy", "torch", "grpc")),
    ],
)
def test_modules_stay_light(module, forbidden):
    code = f"import sys, {module}; sys.exit(', '.join({{*sys.modules}} & {{*{forbidden!r}}}) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
