"""The plan, played on numpy buffers: every destination element arrives once, from the sender that has it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.weights.plan import Box, Layout, Piece, fused, make_plan, replicated, sharded

NAMES = ("q", "k", "v", "gate", "up", "norm", "embed")
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def buffers(layout: Layout, fill: dict[str, np.ndarray] | None) -> dict[tuple[int, str], np.ndarray]:
    """Local buffers of every rank; filled from whole tensors, or with a count of writes (zeros)."""
    sizes: dict[tuple[int, str], np.ndarray] = {}
    for p in layout.pieces:
        stop = np.array(p.offset, dtype=int) + np.array(p.box.size, dtype=int)
        sizes[p.rank, p.local] = np.maximum(sizes.get((p.rank, p.local), stop), stop)
    made = {key: np.full(tuple(stop), np.nan) for key, stop in sizes.items()}
    for p in layout.pieces if fill else ():
        made[p.rank, p.local][window(p.offset, p.box.size)] = fill[p.tensor][window(p.box.start, p.box.size)]
    return made


def window(start, size):
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


@st.composite
def layouts(draw):
    shapes = {n: tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=2))) for n in NAMES}
    shapes |= {n: (*shapes[n][:1], shapes["q"][1]) for n in ("k", "v")} | {"up": (shapes["up"][0], shapes["gate"][1])}
    shapes["norm"] = shapes["norm"][:1]
    dims = {n: draw(st.integers(-1, len(shapes[n]) - 1)) for n in NAMES}
    for names in FUSED.values():  # fused ones share a kind of sharding, as in vLLM
        dims |= dict.fromkeys(names, 0)
    source = sharded(shapes, draw(st.integers(1, 5)), draw(st.sampled_from([None, dims])))
    destination = sharded(shapes, draw(st.integers(1, 4)), dims)
    return shapes, source, fused(destination, FUSED) if draw(st.booleans()) else destination


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_every_destination_element_arrives_once(case):
    shapes, source, destination = case
    truth = {n: np.random.default_rng(1).random(s) for n, s in shapes.items()}
    sent, received = buffers(source, truth), buffers(destination, None)
    plan = make_plan(source, destination)
    for t in plan.transfers:
        data = sent[t.source.rank, t.source.local][window(t.source.offset, t.box.size)]
        for place in t.destinations:
            target = received[place.rank, place.local][window(place.offset, t.box.size)]
            assert np.isnan(target).all(), "written twice"
            target[...] = data
    for key, expected in buffers(destination, truth).items():
        np.testing.assert_array_equal(received[key], expected)


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_bytes_on_the_wire_are_the_distinct_destination_boxes(case):
    _, source, destination = case
    plan = make_plan(source, destination)
    distinct = {(p.tensor, p.box) for p in destination.pieces}
    assert sum(plan.sent_elements().values()) == sum(box.elements for _, box in distinct)
    assert make_plan(source, destination) == plan, "deterministic"
    shuffled = Layout(tuple(reversed(source.pieces)))
    assert make_plan(shuffled, destination) == plan, "and whatever the order of the pieces"


def test_replicas_share_the_sending():
    shapes = {f"layer{i}": (64, 64) for i in range(16)}
    sent = make_plan(replicated(shapes, 4), sharded(shapes, 2)).sent_elements()
    assert set(sent) == {0, 1, 2, 3}
    assert max(sent.values()) == min(sent.values())


def test_fsdp_rows_to_tensor_parallel_columns_by_hand():
    shapes = {"o": (4, 6)}
    plan = make_plan(sharded(shapes, 2), sharded(shapes, 2, {"o": 1}))
    cuts = [(t.source.rank, t.box, t.destinations[0].rank, t.destinations[0].offset) for t in plan.transfers]
    assert cuts == [
        (0, Box((0, 0), (2, 3)), 0, (0, 0)),
        (1, Box((2, 0), (2, 3)), 0, (2, 0)),
        (0, Box((0, 3), (2, 3)), 1, (0, 0)),
        (1, Box((2, 3), (2, 3)), 1, (2, 0)),
    ]


def test_replicated_destination_is_one_transfer_with_all_receivers():
    (transfer,) = make_plan(replicated({"w": (3,)}, 1), replicated({"w": (3,)}, 4)).transfers
    assert [place.rank for place in transfer.destinations] == [0, 1, 2, 3]


def test_an_element_that_nobody_holds_is_named():
    short = Layout((Piece("w", Box((0,), (2,)), 0, "w", (0,)),))
    with pytest.raises(ValueError, match="'w'"):
        make_plan(short, replicated({"w": (3,)}, 1))
