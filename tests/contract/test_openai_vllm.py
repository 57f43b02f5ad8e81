"""The OpenAI endpoint on the vllm engine: a row that grows in pieces is the row that is drawn at once."""

import json

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("vllm", reason="vLLM is not installed")
from services.rollout.__main__ import build
from services.rollout.settings import RolloutSettings
from shared.state import open_store
from shared.state.registry import list_replicas
from tests.contract.test_rollout_service import _configure
from tests.fakes.role import TOKEN, fake_role
from tests.fakes.rollout import rollout_config
from tests.fakes.tiny import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROMPT = [4, 5, 6, 7]


async def test_completions_and_streams(tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1"}], "data_source": "s"}))
    model = write_tiny_llama(tmp_path / "m", head_dim=32)
    more = ("rollout.engine=vllm", "rollout.max_tokens=90", "rollout.context=120")
    config = rollout_config(model, *more, data=str(tmp_path / "d.jsonl"))
    async with fake_role(build, RolloutSettings, redis_url="memory://openai-vllm", threads=1) as served:
        await _configure(served, config)
        [replica] = await list_replicas(open_store("memory://openai-vllm"), "rollout")
        base = f"http://{replica.facts['openai']}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=TOKEN) as client:
            asked = {"model": "policy", "prompt": PROMPT, "max_tokens": 90, "seed": 3, "logprobs": 3}
            more = {"extra_body": {"return_token_ids": True, "min_tokens": 80}}
            whole = await client.completions.create(**asked, **more, n=4)
            ids = [
                token
                async for event in await client.completions.create(**asked, **more, stream=True)
                for token in event.choices[0].token_ids
            ]
    assert ids == whole.choices[0].token_ids
    assert len({tuple(choice.token_ids) for choice in whole.choices}) == 4
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    for choice in whole.choices:
        assert len(choice.token_ids) >= 80
        logits = lm(torch.tensor([PROMPT + choice.token_ids])).logits[0, len(PROMPT) - 1 : -1].double()
        wanted = torch.log_softmax(logits, -1)[torch.arange(len(choice.token_ids)), torch.tensor(choice.token_ids)]
        for place, top in enumerate(choice.logprobs.top_logprobs):
            best = logits[place].log_softmax(-1).topk(3)
            texts = [tokenizer.decode([token]) for token in best.indices]
            assert {*texts, choice.logprobs.tokens[place]} == set(top)
            assert torch.allclose(torch.tensor([top[text] for text in texts]).double(), best.values, atol=1e-4)
        assert torch.allclose(torch.tensor(choice.logprobs.token_logprobs).double(), wanted, atol=1e-4)
