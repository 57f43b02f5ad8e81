"""The hf engine where it differs from others."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig, MambaForCausalLM

from services.rollout.backend import EngineError, SamplingParams
from services.rollout.backends.hf import HfBackend
from tests.fakes.rollout import EOS, collect, requests, rollout_config


@pytest.fixture
async def engine():
    backend = HfBackend()
    yield backend
    await backend.release()


async def test_bfloat16_works_and_promises_no_bits(engine, tiny_llama):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    facts = await engine.configure(rollout_config(tiny_llama, "model.dtype=bfloat16"), tokenizer, prompt_tokens=40)
    assert not facts.batch_invariant
    lm = AutoModelForCausalLM.from_pretrained(tiny_llama)
    await engine.prepare_weights(1, dict(lm.named_parameters()))
    await engine.commit_weights(1)
    done = await collect(engine.generate(requests(6, SamplingParams(max_tokens=12, stop_token_ids=(EOS,)))))
    for sample in done.values():
        count = len(sample.response_ids)
        logits_TV = lm(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0, -count - 1 : -1].detach()
        wanted_T = torch.log_softmax(logits_TV, -1)[torch.arange(count), torch.tensor(sample.response_ids)]
        assert (torch.tensor(sample.logprobs) - wanted_T).abs().mean() < 0.1


async def test_a_model_it_cannot_decode_leaves_it_free(engine, tiny_llama, tmp_path):
    MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)).save_pretrained(
        tmp_path
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    with pytest.raises(EngineError, match="the hf engine cannot decode mamba models"):
        await engine.configure(rollout_config(tmp_path), tokenizer, prompt_tokens=8)
    facts = await engine.configure(rollout_config(tiny_llama), tokenizer, prompt_tokens=40)
    # 40 + 12 tokens, rounded up; far below the model's own 128.
    assert (facts.context, facts.batch_invariant) == (64, True)


async def test_the_context_is_at_most_the_models(engine, tiny_llama):
    config = rollout_config(tiny_llama, "rollout.max_tokens=500")
    facts = await engine.configure(config, AutoTokenizer.from_pretrained(tiny_llama), prompt_tokens=40)
    assert facts.context == 128
