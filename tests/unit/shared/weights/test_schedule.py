"""The schedule, played on numpy buffers bucket by bucket; what DTensors say against torch itself."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.weights.layout import local_part, shard_box
from shared.weights.plan import Box, Layout, Piece, make_plan, replicated, sharded
from shared.weights.schedule import ALIGNMENT, default_bucket, make_schedule
from tests.unit.shared.weights.test_plan import buffers, layouts, window

WIDTHS = {"q": 4, "k": 2, "v": 4, "gate": 2, "up": 2, "norm": 4, "embed": 1}


def shifted(layout: Layout, by: int) -> Layout:
    return Layout(tuple(Piece(p.tensor, p.box, p.rank + by, p.local, p.offset) for p in layout.pieces))


def ranks_of(*sides: Layout) -> int:
    return 1 + max(p.rank for side in sides for p in side.pieces)


@settings(max_examples=100, deadline=None)
@given(layouts(), st.sampled_from([16, 40, 200, 10_000]), st.integers(0, 3), st.randoms())
def test_every_destination_element_arrives_once(case, most, gpus, random):
    shapes, source, destination = case
    destination = shifted(destination, ranks_of(source))
    devices = [f"gpu{random.randrange(gpus)}" if gpus else "cpu" for _ in range(ranks_of(source, destination))]
    plan = make_plan(source, destination)
    sees = [{f"gpu{n}" for n in range(3) if random.random() < 0.5} for _ in devices]
    schedule = make_schedule(plan, WIDTHS, devices, most, sees)
    truth = {n: np.random.default_rng(1).random(s) for n, s in shapes.items()}
    sent, received = buffers(source, truth), buffers(destination, None)
    for bucket in schedule.buckets:
        route = schedule.routes[bucket.route]
        assert bucket.nbytes <= max(most, 4)
        ends = 0
        for part in bucket.parts:
            assert part.offset % ALIGNMENT == 0
            assert part.offset >= ends
            ends = part.offset + part.nbytes
            assert (part.source.rank, *(p.rank for p in part.destinations)) == route.ranks
    for route in schedule.routes:
        on_gpus = [devices[rank] for rank in route.ranks if devices[rank] != "cpu"]
        assert len(set(on_gpus)) == len(on_gpus), "NCCL refuses two ranks on one GPU"
    for part in (*(part for bucket in schedule.buckets for part in bucket.parts), *schedule.mapped):
        data = sent[part.source.rank, part.source.local][window(part.source.offset, part.box.size)]
        for place in part.destinations:
            target = received[place.rank, place.local][window(place.offset, part.box.size)]
            assert np.isnan(target).all(), "written twice"
            target[...] = data
    for key, expected in buffers(destination, truth).items():
        np.testing.assert_array_equal(received[key], expected)
    for part in schedule.mapped:
        home = devices[part.source.rank]
        assert home != "cpu"
        elsewhere = [p.rank for p in part.destinations if devices[p.rank] != home]
        assert len(elsewhere) <= 1
        assert all(home in sees[rank] for rank in elsewhere)


def test_what_is_cut_shares_no_bucket_and_those_of_a_width_travel_together():
    shapes = {"a": (4,), "b": (3,), "big": (3, 150), "c": (8,), "d": (6,), "e": (16,)}
    widths = {"a": 2, "b": 4, "big": 4, "c": 4, "d": 2, "e": 4}
    plan = make_plan(replicated(shapes, 1), shifted(replicated(shapes, 1), 1))
    buckets = make_schedule(plan, widths, ["a", "b"], 1000).buckets
    assert [[part.tensor for part in bucket.parts] for bucket in buckets] == [
        ["b"], *([["big"]] * 3), ["c", "e", "a", "d"],
    ]  # fmt: skip
    assert [part.offset for part in buckets[-1].parts] == [0, ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT]


def test_pairs_that_share_nobody_travel_at_the_same_time():
    shapes = {f"layer{i}": (8, 8) for i in range(4)}
    plan = make_plan(sharded(shapes, 2), shifted(sharded(shapes, 2, dict.fromkeys(shapes, 1)), 2))
    schedule = make_schedule(plan, dict.fromkeys(shapes, 4), ["a", "b", "c", "d"], 64)
    ranks = [schedule.routes[bucket.route].ranks for bucket in schedule.buckets]
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        assert set(first).isdisjoint(second)


def test_replicas_share_one_route_and_one_on_the_senders_gpu_maps():
    shapes = {"w": (4, 4)}
    plan = make_plan(replicated(shapes, 1), shifted(replicated(shapes, 3), 1))
    schedule = make_schedule(plan, {"w": 4}, ["a", "b", "a", "c"], 1 << 20)
    assert [route.ranks for route in schedule.routes] == [(0, 1, 3)]
    assert [[place.rank for place in part.destinations] for part in schedule.mapped] == [[2]]


def test_who_sees_the_senders_gpu_maps_when_it_is_alone():
    shapes = {"w": (4, 4)}
    for receivers, mapped in ((1, [[1]]), (2, [])):
        plan = make_plan(replicated(shapes, 1), shifted(replicated(shapes, receivers), 1))
        schedule = make_schedule(plan, {"w": 4}, ["a", "b", "c"], 1 << 20, [[], ["a", "b"], ["a", "c"]])
        assert [[place.rank for place in part.destinations] for part in schedule.mapped] == mapped
        assert len(schedule.routes) == 1 - len(mapped)


class Placement:
    """As torch's, with the methods that we ask."""

    def __init__(self, dim: int | None, partial: bool = False) -> None:
        if dim is not None:
            self.dim = dim
        self._dim, self._partial = dim, partial

    def is_replicate(self) -> bool:
        return self._dim is None and not self._partial

    def is_partial(self) -> bool:
        return self._partial


def test_partial_sums_are_no_part_of_a_tensor():
    with pytest.raises(ValueError, match="redistribute"):
        shard_box((4,), (2,), (0,), [Placement(None, partial=True)])


def test_a_plain_tensor_is_whole():
    tensor = torch.zeros(3, 5)
    assert local_part(tensor) == (tensor, Box((0, 0), (3, 5)))


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (3, 2), (8,)])
@pytest.mark.parametrize("shape", [(7, 6), (8, 4), (1, 5), (6,)])
def test_boxes_are_torchs_own(mesh, shape):
    """Every placement of Shard and Replicate, and FSDP over tensor parallelism, against torch's arithmetic."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    choices = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    placements = [(p,) for p in choices] if len(mesh) == 1 else [(p, q) for p in choices for q in choices]
    for chosen in placements:
        for coordinate in np.ndindex(*mesh):
            size, start = _compute_local_shape_and_global_offset(torch.Size(shape), mesh, list(coordinate), chosen)
            box = shard_box(shape, mesh, coordinate, chosen)
            if box.elements:
                assert (box.size, box.start) == (tuple(size), tuple(start)), (chosen, coordinate)
            else:
                assert 0 in size


def test_fsdp_over_tensor_parallelism_was_cut_last():
    """Mesh (2 FSDP, 2 TP), both on dimension 0: TP rank 1 has the lower half, and FSDP cuts that half."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = (_StridedShard(0, split_factor=2), Shard(0))
    starts = [shard_box((8, 3), (2, 2), at, placements).start[0] for at in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert starts == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("model", "bucket"),
    [(0, 256 << 20), (3 * 10**9, 256 << 20), (13_480_000_000, 842_500_000), (26 * 10**9, 1 << 30)],
)
def test_a_bucket_is_a_sixteenth_of_the_model_within_bounds(model: int, bucket: int) -> None:
    assert default_bucket(model) == bucket
