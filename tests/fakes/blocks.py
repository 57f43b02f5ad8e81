"""Random blocks for tests."""

import numpy as np
from hypothesis import strategies as st

from shared.batch.block import Block, Ragged, RowKey

uids = st.text(max_size=6)
keys = st.lists(st.builds(RowKey, uids, st.integers(0, 3)), unique=True, max_size=6)
names = st.lists(st.text(min_size=1, max_size=8).map("my/".__add__), unique=True, max_size=4)
floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
element = {
    "int32": st.integers(-(2**31), 2**31 - 1),
    "float32": floats,
    "uint8": st.integers(0, 255),
}


@st.composite
def columns(draw, rows: int) -> Ragged:
    dtype = draw(st.sampled_from([*element, "utf8"]))
    if dtype == "utf8":
        return Ragged.from_text(draw(st.lists(st.text(max_size=5), min_size=rows, max_size=rows)))
    lists = st.lists(st.lists(element[dtype], max_size=5), min_size=rows, max_size=rows)
    return Ragged.from_rows([np.array(row) for row in draw(lists)], dtype)


@st.composite
def blocks(draw) -> Block:
    rows = draw(keys)
    return Block(tuple(rows), {name: draw(columns(len(rows))) for name in draw(names)})


def samples(rows: int = 8, length: int = 5, seed: int = 0) -> Block:
    """Rows as rollout makes them, in part: ids, log-probs and text."""
    rng = np.random.default_rng(seed)
    lengths = [length + i % 3 for i in range(rows)]
    return Block(
        tuple(RowKey(f"1:{i // 2}:0", i % 2) for i in range(rows)),
        {
            "response_ids": Ragged.from_rows([rng.integers(0, 1000, n) for n in lengths], "int32"),
            "rollout_logprobs": Ragged.from_rows([rng.standard_normal(n) for n in lengths], "float32"),
            "response_mask": Ragged.from_rows([np.ones(n) for n in lengths], "uint8"),
            "response": Ragged.from_text(["é" * (n % 4) for n in lengths]),
        },
    )


def scores(rows: tuple[RowKey, ...], name: str = "score") -> Block:
    """One score per row: its place in `rows`."""
    return Block(rows, {name: Ragged.from_scalars(np.arange(len(rows)), "float32")})
