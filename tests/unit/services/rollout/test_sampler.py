"""Drawing tokens, against the plain definition."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.backend import SamplingParams
from services.rollout.backends.sampler import Draw, draw, inverse_cdf, uniform


def _one(logits_V, params, seed=0, position=0):
    tokens, logprobs, finite = draw(logits_V[None], [Draw(params, seed, position)])
    assert finite == [True]
    return tokens[0], logprobs[0]


def test_splitmix64_reference_values():
    # The first outputs of the authors' C code for seed 1234567.
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [uniform(1234567, k) for k in range(3)] == [(number >> 11) * 2.0**-53 for number in wanted]


def test_uniform_numbers_look_uniform():
    numbers = [uniform(seed, position) for seed in range(200) for position in range(50)]
    assert 0 <= min(numbers) < 0.001
    assert 0.999 < max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**32), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_is_the_plain_one(vocabulary, seed, number):
    generator = torch.Generator().manual_seed(seed)
    weights_V = torch.rand(vocabulary, generator=generator) * (torch.rand(vocabulary, generator=generator) < 0.5)
    weights_V[int(torch.randint(vocabulary, (1,), generator=generator))] = 1.0
    token = int(inverse_cdf(weights_V[None], torch.tensor([number], dtype=torch.float64))[0])
    assert weights_V[token] > 0
    plain_V = weights_V.double().cumsum(0) / weights_V.double().sum()
    before = plain_V[token - 1] if token else 0.0
    assert before - 1e-12 <= number <= plain_V[token] + 1e-12


@pytest.mark.parametrize("number", [0.0, math.nextafter(1, 0)])
def test_the_ends_of_the_unit_interval(number):
    weights_NV = torch.zeros(1, 600)
    weights_NV[0, [3, 300, 511]] = 0.1
    token = int(inverse_cdf(weights_NV, torch.tensor([number], dtype=torch.float64))[0])
    assert token == (3 if number == 0 else 511)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    logits_V = torch.tensor([0.0, 1.0, 2.0, -1.0])
    params = SamplingParams(temperature=temperature)
    count = 4000
    drawn = Counter(_one(logits_V, params, seed)[0] for seed in range(count))
    wanted_V = torch.softmax(logits_V / temperature, 0)
    for token in range(4):
        assert drawn[token] / count == pytest.approx(float(wanted_V[token]), abs=0.03)


def test_logprob_is_before_min_tokens_top_k_and_top_p():
    logits_V = torch.tensor([3.0, 1.0, 0.5, 0.0])
    wanted_V = torch.log_softmax(logits_V / 0.7, 0)
    for params in (
        SamplingParams(temperature=0.7, top_k=2),
        SamplingParams(temperature=0.7, top_p=0.5),
        SamplingParams(temperature=0.7, min_tokens=1, stop_token_ids=(0,)),
        SamplingParams(temperature=0.7, greedy=True),
    ):
        token, logprob = _one(logits_V, params, seed=5)
        assert logprob == pytest.approx(float(wanted_V[token]), abs=1e-6)


def _support(logits_V, params):
    return {_one(logits_V, params, seed)[0] for seed in range(600)}


def test_top_k_and_top_p_keep_the_likely():
    logits_V = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2]))
    assert _support(logits_V, SamplingParams(top_k=2)) == {1, 2}
    assert _support(logits_V, SamplingParams(top_p=0.65)) == {1, 2}
    assert _support(logits_V, SamplingParams(top_p=0.75)) == {1, 2, 3}
    assert _support(logits_V, SamplingParams(top_p=0.01)) == {1}
    # Of the three that top_k keeps, 0.4 / 0.9 and 0.3 / 0.9 reach 0.75; of all four they would not.
    assert _support(logits_V, SamplingParams(top_k=3, top_p=0.75)) == {1, 2}


def test_greedy_takes_the_first_of_the_most_likely():
    assert _one(torch.tensor([1.0, 2.0, 2.0]), SamplingParams(greedy=True))[0] == 1


def test_no_stop_token_before_min_tokens():
    # So likely that in float32 all others together have no probability at all.
    logits_V = torch.tensor([0.0, 1.0, 200.0, 200.0])
    params = SamplingParams(min_tokens=3, stop_token_ids=(2, 3))
    assert {_one(logits_V, params, seed, position)[0] for seed in range(50) for position in range(3)} == {0, 1}
    assert {_one(logits_V, params, seed, 3)[0] for seed in range(50)} == {2, 3}


def test_a_distribution_that_is_not_finite_is_reported():
    logits_NV = torch.tensor([[0.0, float("nan")], [0.0, 1.0]])
    drawn = Draw(SamplingParams(), 0, 0)
    assert draw(logits_NV, [drawn, drawn])[2] == [False, True]


def test_neighbours_change_nothing():
    logits_NV = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)) * 3
    plain = Draw(SamplingParams(temperature=0.9), 7, 3)
    others = [
        None,
        Draw(SamplingParams(top_k=3), 1, 0),
        Draw(SamplingParams(top_p=0.3, temperature=2.0), 2, 9),
        Draw(SamplingParams(greedy=True), 3, 1),
        Draw(SamplingParams(min_tokens=4, stop_token_ids=(1, 2)), 4, 1),
    ]
    tokens, logprobs, _ = draw(logits_NV, [plain, *[None] * 5])
    mixed_tokens, mixed_logprobs, _ = draw(logits_NV, [plain, *others])
    assert (tokens[0], logprobs[0]) == (mixed_tokens[0], mixed_logprobs[0])
