"""The slots: right against the plain model, and bit-equal whatever shares the batch (law 7)."""

import dataclasses
import random

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from services.rollout.backend import EngineError, SamplingParams
from services.rollout.backends.decoder import Decoder
from services.rollout.backends.slots import use_slot_attention
from services.rollout.backends.trial import try_out
from tests.fakes.rollout import EOS, keyed, requests, tiny_model

KINDS = ("llama", "qwen2", "gpt2")
PARAMS = SamplingParams(temperature=0.8, max_tokens=12, stop_token_ids=(EOS, 9))


@pytest.fixture
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


def _decoder(model, tokenizer, slots=4, length=64):
    use_slot_attention(model, length)
    return Decoder(model, tokenizer, slots, length)


def _run(decoder, rows):
    decoder.add(rows, "owner")
    done = []
    while decoder.busy:
        done += [sample for _, sample in decoder.step()]
    return keyed(done)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_plain_models(kind, tokenizer):
    plain = tiny_model(kind)
    for sample in _run(_decoder(tiny_model(kind), tokenizer), requests(10, PARAMS)).values():
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        logits_TV = plain(ids).logits[0, len(sample.prompt_ids) - 1 : -1].detach()
        wanted_T = torch.log_softmax(logits_TV / 0.8, -1).gather(1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
        assert torch.allclose(torch.tensor(sample.logprobs), wanted_T, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, 3, 4, 7, 16])
def test_bits_do_not_depend_on_neighbours_slots_order_or_replicas(kind, slots, tokenizer):
    rows = requests(20, PARAMS, n=4)
    decoder = _decoder(tiny_model(kind), tokenizer, slots)
    together = _run(decoder, rows)
    alone = {}
    for row in rows:
        alone |= _run(decoder, [row])
    assert alone == together
    shuffled = random.Random(0).sample(rows, len(rows))
    assert _run(decoder, shuffled) == together
    replicas = [_decoder(tiny_model(kind), tokenizer, slots) for _ in range(3)]
    assert replicas[0] is not replicas[1]
    split = {}
    for number, replica in enumerate(replicas):
        split |= _run(replica, shuffled[number::3])
    assert split == together


def test_bits_with_other_sampling_beside(tokenizer):
    rows = requests(8, PARAMS)
    decoder = _decoder(tiny_model("llama"), tokenizer, 4)
    alone = _run(decoder, rows)
    other = dataclasses.replace(PARAMS, top_p=0.5, top_k=7, temperature=1.7, min_tokens=5, max_tokens=30)
    beside = [dataclasses.replace(row, uid=f"other{row.uid}", params=other) for row in requests(9, other)]
    mixed = _run(decoder, [row for pair in zip(rows, beside, strict=False) for row in pair])
    assert {key: mixed[key] for key in alone} == alone


def _smollm2_shape(layers=2):
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def test_bits_with_the_shape_of_smollm2(tokenizer):
    decoder = _decoder(_smollm2_shape(), tokenizer, slots=16, length=128)
    params = SamplingParams(max_tokens=5, stop_token_ids=(EOS,))
    rows = requests(20, params, n=5, longest=40, vocabulary=49152)
    together = _run(decoder, rows)
    assert _run(decoder, rows[::-1]) == together
    assert _run(decoder, rows[3:4]) == {key: together[key] for key in [("p0", 3)]}


def test_seeds_temperature_and_budget(tokenizer):
    decoder = _decoder(tiny_model("llama"), tokenizer)
    rows = requests(12, dataclasses.replace(PARAMS, stop_token_ids=(), max_tokens=8), n=6)
    done = _run(decoder, rows)
    assert {len(sample.response_ids) for sample in done.values()} == {8}
    assert {sample.finish for sample in done.values()} == {"length"}
    assert len({sample.response_ids for sample in done.values()}) == 12
    greedy = [dataclasses.replace(row, params=dataclasses.replace(row.params, greedy=True)) for row in rows]
    assert len({sample.response_ids for sample in _run(decoder, greedy).values()}) == 2


def test_stop_tokens_stay_in_the_response(tokenizer):
    stops = tuple(range(0, 64, 4))
    params = dataclasses.replace(PARAMS, stop_token_ids=stops, max_tokens=40, min_tokens=3)
    for sample in _run(_decoder(tiny_model("llama"), tokenizer), requests(30, params)).values():
        assert sample.finish == "stop"
        assert sample.response_ids[-1] in stops
        assert len(sample.response_ids) > 3
        assert not set(sample.response_ids[:-1]) & set(stops)


def test_the_context_ends_a_row(tokenizer):
    decoder = _decoder(tiny_model("llama"), tokenizer, length=16)
    params = SamplingParams(max_tokens=100)
    done = _run(decoder, requests(10, params, longest=14))
    assert all(len(sample.prompt_ids) + len(sample.response_ids) == 16 for sample in done.values())
    assert all(sample.finish == "length" for sample in done.values())


def test_a_prompt_without_room_is_refused_and_none_is_queued(tokenizer):
    decoder = _decoder(tiny_model("llama"), tokenizer, length=16)
    good, bad = requests(2, PARAMS)[0], dataclasses.replace(requests(1, PARAMS)[0], prompt_ids=tuple(range(4, 20)))
    with pytest.raises(EngineError, match="p0 has 16 tokens: no room for a response in 16 positions"):
        decoder.add([good, bad], None)
    with pytest.raises(EngineError, match="empty"):
        decoder.add([dataclasses.replace(good, prompt_ids=())], None)
    assert not decoder.busy


def test_an_aborted_row_goes_on_where_it_was(tokenizer):
    decoder = _decoder(tiny_model("llama"), tokenizer)
    rows = requests(6, dataclasses.replace(PARAMS, max_tokens=20, stop_token_ids=()))
    whole = _run(decoder, rows)
    decoder.add(rows, None)
    for _ in range(7):
        assert decoder.step() == []
    partial = keyed([sample for _, sample in decoder.remove()])
    assert not decoder.busy
    assert {sample.finish for sample in partial.values()} == {"aborted"}
    assert sorted({len(sample.response_ids) for sample in partial.values()}) == [0, 8]
    decoder.version = 3
    resumed = _run(decoder, [dataclasses.replace(row, partial=partial[row.uid, row.sample]) for row in rows])
    for key, sample in resumed.items():
        # The same numbers are drawn; only the last bits of the prefilled keys may differ.
        assert sample.response_ids == whole[key].response_ids
        count = len(partial[key].response_ids)
        assert sample.versions == (0,) * count + (3,) * (20 - count)


def test_weights_that_are_not_finite_are_an_error(tokenizer):
    model = tiny_model("llama")
    decoder = _decoder(model, tokenizer)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    decoder.add(requests(1, PARAMS), None)
    with pytest.raises(EngineError, match="no finite distribution"):
        decoder.step()


@pytest.mark.parametrize("kind", KINDS)
def test_the_trial_passes_plain_models_and_says_they_are_invariant(kind, tokenizer):
    assert try_out(_decoder(tiny_model(kind), tokenizer), torch.float32)


def test_the_trial_refuses_a_model_that_looks_elsewhere(tokenizer):
    model = tiny_model("llama")
    decoder = _decoder(model, tokenizer)
    # Mixes over the tokens of a call, so what was said before must be remembered otherwise than as keys and values.
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, inputs, output: output + output.mean(1, keepdim=True)
    )
    with pytest.raises(EngineError, match="token by token"):
        try_out(decoder, torch.float32)


def test_models_with_other_state_are_refused():
    mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(EngineError, match="the hf engine cannot decode mamba models"):
        use_slot_attention(mamba, 64)


def test_a_window_must_cover_the_run():
    shape = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    mistral = MistralForCausalLM(MistralConfig(**shape, num_key_value_heads=2, sliding_window=48))
    with pytest.raises(EngineError, match="SlidingWindow"):
        use_slot_attention(mistral, 64)
    use_slot_attention(mistral, 48)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "smollm2"])
@pytest.mark.parametrize("slots", [1, 5, 16, 64])
def test_bits_on_a_gpu(kind, slots, tokenizer):
    model = _smollm2_shape() if kind == "smollm2" else tiny_model(kind)
    decoder = _decoder(model.to("cuda"), tokenizer, slots, length=128)
    params = dataclasses.replace(PARAMS, stop_token_ids=(EOS,), max_tokens=20)
    rows = requests(40, params, n=5, longest=40, vocabulary=model.config.vocab_size)
    together = _run(decoder, rows)
    assert _run(decoder, rows[::-1]) == together
    assert _run(decoder, rows[3:4]) == {key: together[key] for key in [("p0", 3)]}
    assert try_out(decoder, torch.float32)
