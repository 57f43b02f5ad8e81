"""Routing: splits by brute force, homes, and what a slow replica gets."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.routing import BUSIER, LEAST, SLACK, Speeds, assign, home_of, pick

REPLICAS = ("a", "b", "c")
WEIGHTS = st.floats(0.5, 20)


def ends(units, chosen, speeds):
    return max(sum(w for (w, _), c in zip(units, chosen, strict=True) if c == r) / s for r, s in speeds.items())


@given(st.lists(WEIGHTS, min_size=1, max_size=6), st.tuples(WEIGHTS, WEIGHTS, WEIGHTS))
def test_a_split_is_near_the_best_there_is(weights, speeds):
    """Against all 3^n splits. For machines of different speeds LPT is within 5/3 (Friesen 1987)."""
    units, rates = [(weight, "") for weight in weights], dict(zip(REPLICAS, speeds, strict=True))
    chosen = assign(units, rates)
    best = min(ends(units, split, rates) for split in itertools.product(REPLICAS, repeat=len(units)))
    assert ends(units, chosen, rates) <= best * 5 / 3 + 1e-9
    assert assign(units, rates) == chosen


def test_a_slow_replica_gets_less():
    chosen = assign([(1.0, "")] * 90, {"fast": 8.0, "slow": 1.0})
    assert chosen.count("slow") == 10


def test_a_home_is_kept_up_to_its_fair_share():
    even = {"a": 1.0, "b": 1.0}
    assert assign([(1.0, "a"), (1.0, "b")] * 4, even) == ["a", "b"] * 4
    assert assign([(1.0, "b"), (1.0, "b"), (1.0, "a"), (1.0, "a")], even) == ["b", "b", "a", "a"]
    assert assign([(1.0, "a")] * 16, even).count("a") == 8
    assert assign([(1.0, "gone")], even) == ["a"]
    assert assign([(1.0, "b")], even) == ["b"]


def test_who_has_work_already_gets_less():
    assert assign([(1.0, "")] * 4, {"a": 1.0, "b": 1.0}, {"a": 2.0}).count("a") == 1
    assert assign([(1.0, "a")] * 2, {"a": 1.0, "b": 1.0}, {"a": 5.0}) == ["b", "b"]


@given(st.lists(st.tuples(WEIGHTS, st.sampled_from(["", *REPLICAS])), min_size=1, max_size=6))
def test_homes_cost_no_time_beyond_the_bound(units):
    even = dict.fromkeys(REPLICAS, 1.0)
    best = min(ends(units, split, even) for split in itertools.product(REPLICAS, repeat=len(units)))
    assert ends(units, assign(units, even), even) <= best * 4 / 3 + 1e-9


@given(st.dictionaries(st.sampled_from(REPLICAS), st.floats(0, 100), min_size=1), st.sampled_from([*REPLICAS, "gone"]))
def test_one_request_goes_home_or_to_the_least_loaded(loads, home):
    least = min(loads.values())
    if home in loads and loads[home] <= BUSIER * least + SLACK:
        assert pick(loads, home) == home
    else:
        assert loads[pick(loads, home)] == least


def test_homes_are_spread_and_move_only_with_their_replica():
    keys = [f"prompt {k}" for k in range(300)]
    homes = {key: home_of(key, REPLICAS) for key in keys}
    assert min(list(homes.values()).count(replica) for replica in REPLICAS) > 60
    for key in keys:
        assert home_of(key, REPLICAS[::-1]) == homes[key]
        assert homes[key] == "c" or home_of(key, ("a", "b")) == homes[key]


def test_speeds_are_a_weighted_mean():
    speeds = Speeds(0.5)
    assert speeds.of(["a", "b"]) == {"a": 1.0, "b": 1.0}
    speeds.saw("a", 100, 1)
    speeds.saw("a", 300, 1)
    speeds.saw("b", 50, 0)
    assert speeds.of(["a", "b"]) == {"a": 200.0, "b": 200.0}
    speeds.saw("b", 100, 1)
    assert speeds.of(["a", "b", "new"]) == pytest.approx({"a": 195.0, "b": 105.0, "new": 150.0})
    speeds.forget("a")
    assert speeds.of(["a", "b"]) == {"a": 100.0, "b": 100.0}


def test_replicas_alike_are_equal_and_the_slowest_is_still_tried():
    speeds = Speeds()
    speeds.saw("a", 100, 1)
    speeds.saw("b", 120, 1)
    assert len(set(speeds.of(["a", "b"]).values())) == 1
    speeds.saw("c", 0.001, 1)
    found = speeds.of(["a", "b", "c"])
    assert found["c"] >= LEAST * max(found.values())
    assert assign([(1.0, "")] * 60, found).count("c") >= 1
