"""Shares and own times, from events made by hand."""

import random
from typing import Any

import pytest

from shared.training.spans import TOP, Span, Top, covered, own_times, summarize

MS = 1_000_000


def span(name: str, start: float, end: float, **of: Any) -> Span:
    """Times in milliseconds."""
    return Span(name, round(start * MS), round(end * MS), **of)


def test_a_cpu_computes_in_its_operators_and_waits_for_gloo() -> None:
    spans = [
        # A linear layer that takes 1 ms itself, and two operators within; one calls another.
        span("aten::linear", 0, 10), span("aten::addmm", 1, 9), span("aten::copy_", 2, 4), span("aten::t", 9, 10),
        # Begun by an operator of 1 ms, under way for 8 in the background; a second one overlaps it by 3 ms.
        span("c10d::allreduce_", 12, 13), span("gloo:all_reduce", 13, 21, thread=2, is_async=True),
        span("gloo:all_gather", 18, 23, thread=2, is_async=True),
        # The optimizer, and Python between its operators.
        span("Optimizer.step#AdamW.step", 30, 40), span("aten::mul_", 31, 33), span("aten::mul_", 34, 35),
    ]  # fmt: skip
    shares = summarize(spans, 0.05)
    assert shares.communication == pytest.approx(10 / 50)
    assert shares.compute == pytest.approx((1 + 6 + 2 + 1 + 3) / 50)
    longest = [Top("gloo:all_reduce", 0.008, 1), Top("aten::addmm", 0.006, 1), Top("gloo:all_gather", 0.005, 1)]
    assert shares.top[:3] == longest
    assert Top("aten::mul_", 0.003, 2) in shares.top
    assert {name for name, _, _ in shares.top} & {"c10d::allreduce_", "Optimizer.step#AdamW.step"} == set()


def test_a_gpu_computes_and_communicates_at_the_same_time() -> None:
    gpu = {"on_device": True}
    spans = [
        span("aten::mm", 0, 5), span("cudaLaunchKernel", 1, 2),
        span("sm90_xmma_gemm", 10, 30, **gpu), span("void at::native::add", 25, 35, **gpu, thread=7),
        span("Memcpy HtoD (Pinned -> Device)", 40, 50, **gpu),
        span("ncclDevKernel_AllGather_RING_LL", 20, 45, **gpu, thread=9),
        # Small numbers of the ranks, by way of the CPU.
        span("gloo:all_gather", 60, 70, thread=2, is_async=True),
    ]  # fmt: skip
    shares = summarize(spans, 0.1)
    assert shares.communication == pytest.approx(35 / 100)
    assert shares.compute == pytest.approx(25 / 100)
    assert [name for name, _, _ in shares.top[:2]] == ["ncclDevKernel_AllGather_RING_LL", "sm90_xmma_gemm"]
    assert "aten::mm" not in {name for name, _, _ in shares.top}


def test_what_nothing_happened_in_has_no_shares() -> None:
    assert summarize([], 1.0) == (0.0, 0.0, [])


def test_the_top_is_short() -> None:
    shares = summarize([span(f"aten::op{n}", 10 * n, 11 * n) for n in range(1, 30)], 1.0)
    assert len(shares.top) == TOP
    assert shares.top[0].name == "aten::op29"


@pytest.mark.parametrize("seed", range(5))
def test_union_and_own_times_equal_a_count_of_every_tick(seed: int) -> None:
    rng = random.Random(seed)
    free = [Span("x", start, start + rng.randint(0, 9)) for start in rng.choices(range(60), k=12)]
    assert covered(free) == sum(any(each.start <= tick < each.end for each in free) for tick in range(80))

    # Calls nest: a span within another is its callee. The innermost one under way owns a tick.
    nested: list[Span] = []

    def call(start: int, end: int, depth: int) -> None:
        nested.append(Span(f"d{depth}", start, end))
        if end - start > 3:
            middle = rng.randint(start + 2, end - 2)
            call(start + 1, middle, depth + 1)
            call(middle, end - 1, depth + 1)

    call(0, 64, 0)
    assert len(nested) > 9
    shuffled = rng.sample(nested, len(nested))
    spent: dict[str, int] = {}
    for name, time in own_times(shuffled):
        spent[name] = spent.get(name, 0) + time
    owners = [max((each.name for each in nested if each.start <= tick < each.end), default="") for tick in range(64)]
    assert {name: time for name, time in spent.items() if time} == {name: owners.count(name) for name in set(owners)}
