"""The OpenAI endpoint of a rollout replica, through the official client, on the hf engine and a tiny model."""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass

import httpx
import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.rollout.__main__ import build
from services.rollout.openai import app as app_module
from services.rollout.settings import RolloutSettings
from shared import http
from shared.state import open_store
from shared.state.registry import list_replicas
from tests.contract.test_rollout_service import _actor, _commit, _configure, _generate, _prepare, _prompts, _weights
from tests.fakes.chat import write_chat_llama
from tests.fakes.role import TOKEN, RunningRole, fake_role
from tests.fakes.rollout import rollout_config

torch.set_num_threads(1)
pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [4, 5, 6, 7]
MESSAGES = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_llama(tmp_path_factory.mktemp("openai-model"))


@pytest.fixture(scope="module")
def config(model, tmp_path_factory):
    data = tmp_path_factory.mktemp("data") / "d.jsonl"
    data.write_text(json.dumps({"prompt": MESSAGES, "data_source": "s"}) + "\n")
    return rollout_config(model, "rollout.max_tokens=24", "rollout.context=128", data=str(data))


@contextlib.asynccontextmanager
async def served_rollout(url, config):
    """A configured replica and the base URL of its face."""
    async with fake_role(build, RolloutSettings, redis_url=url, threads=1) as served:
        await _configure(served, config)
        [replica] = await list_replicas(open_store(url), "rollout")
        yield served, f"http://{replica.facts['openai']}"


def client_of(base, key=TOKEN):
    return openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0)


@dataclass(frozen=True)
class Served:
    role: RunningRole
    base: str
    client: openai.AsyncOpenAI


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(config):
    async with served_rollout("memory://openai", config) as (role, base), client_of(base) as client:
        yield Served(role, base, client)


async def test_the_policy_is_the_model(served):
    [found] = (await served.client.models.list()).data
    assert (found.id, found.owned_by, found.weight_version, found.max_model_len) == ("policy", "sextet", 0, 128)
    assert (await served.client.models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        await served.client.models.retrieve("gpt")


async def test_token_ids_in_and_out_and_their_log_probs(served, model):
    answer = await served.client.completions.create(
        model="policy", prompt=PROMPT, n=3, seed=7, logprobs=0, temperature=1.3, max_tokens=20,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    for choice in answer.choices:
        ids = choice.token_ids
        assert choice.prompt_token_ids == PROMPT
        assert choice.text == tokenizer.decode(ids, skip_special_tokens=True)
        assert choice.finish_reason == ("stop" if ids[-1] == 2 else "length")
        logits = lm(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].double() / 1.3
        wanted = torch.log_softmax(logits, -1)[torch.arange(len(ids)), torch.tensor(ids)]
        assert torch.allclose(torch.tensor(choice.logprobs.token_logprobs).double(), wanted, atol=1e-4)
        assert choice.weight_versions == [[0, len(ids)]]
    written = sum(len(choice.token_ids) for choice in answer.choices)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, written)
    assert (answer.weight_version, answer.system_fingerprint) == (0, "r@0")
    again = await served.client.completions.create(
        model="policy",
        prompt=PROMPT,
        n=3,
        seed=7,
        temperature=1.3,
        max_tokens=20,
        extra_body={"return_token_ids": True},
    )
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in answer.choices]
    other = await served.client.completions.create(model="policy", prompt=PROMPT, temperature=1.3, max_tokens=20)
    third = await served.client.completions.create(model="policy", prompt=PROMPT, temperature=1.3, max_tokens=20)
    assert other.choices[0].text != third.choices[0].text


async def test_several_prompts_of_text_and_greedy(served):
    answer = await served.client.completions.create(
        model="r", prompt=["1+1=", "2+2="], temperature=0, max_tokens=5, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].prompt_token_ids != answer.choices[1].prompt_token_ids
    with pytest.raises(openai.BadRequestError, match="300 prompts in a request: 256 at most"):
        await served.client.completions.create(model="r", prompt=["1"] * 300)
    again = await served.client.completions.create(model="r", prompt="1+1=", temperature=0, max_tokens=5)
    assert again.choices[0].text == answer.choices[0].text


@pytest.mark.parametrize("stop", [None, "e", ["zz", "a", "4"]])
async def test_a_stream_says_what_the_whole_answer_says(served, stop):
    asked = {"model": "policy", "messages": MESSAGES, "seed": 3, "max_tokens": 40, "logprobs": True, "stop": stop}
    asked = {name: value for name, value in asked.items() if value is not None}
    whole = await served.client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    text, ids, logprobs, roles, finish, usage = "", [], [], [], None, None
    stream = await served.client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
    )
    async for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            text += choice.delta.content
            roles += [choice.delta.role] if choice.delta.role else []
            ids += choice.token_ids
            logprobs += [entry.logprob for entry in choice.logprobs.content]
            finish = choice.finish_reason or finish
    [choice] = whole.choices
    assert (text, ids, roles, finish) == (choice.message.content, choice.token_ids, ["assistant"], choice.finish_reason)
    assert logprobs == [entry.logprob for entry in choice.logprobs.content]
    assert usage == whole.usage
    for each in [stop] if isinstance(stop, str) else stop or []:
        assert each not in text


async def test_the_most_likely_tokens_of_every_place(served, model):
    """By the model itself, at the sampling temperature; streams and completions say the same."""
    asked = {"model": "policy", "messages": MESSAGES, "seed": 3, "temperature": 1.3, "max_tokens": 12}
    more = {"logprobs": True, "top_logprobs": 4, "extra_body": {"return_token_ids": True}}
    [choice] = (await served.client.chat.completions.create(**asked, **more)).choices
    prompt, ids = choice.prompt_token_ids, choice.token_ids
    tokenizer, lm = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    logits = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double() / 1.3
    best = torch.log_softmax(logits, -1).topk(4)
    for entry, tokens, values in zip(choice.logprobs.content, best.indices, best.values, strict=True):
        assert [other.token for other in entry.top_logprobs] == [tokenizer.decode([token]) for token in tokens]
        given = torch.tensor([other.logprob for other in entry.top_logprobs])
        assert torch.allclose(given.double(), values, atol=1e-4)
    streamed = [
        entry.model_dump()
        async for event in await served.client.chat.completions.create(**asked, **more, stream=True)
        for entry in event.choices[0].logprobs.content
    ]
    assert streamed == [entry.model_dump() for entry in choice.logprobs.content]
    completion = await served.client.completions.create(
        model="policy", prompt=prompt, seed=3, temperature=1.3, max_tokens=12, logprobs=4
    )
    for place, entry in enumerate(choice.logprobs.content):
        top = completion.choices[0].logprobs.top_logprobs[place]
        assert {other.token for other in entry.top_logprobs} | {entry.token} == set(top)


TOOLS = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }}{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments.x }}){% endfor %}{% endfor %}<a>"
)


async def test_tools_and_their_calls_reach_the_template(served, monkeypatch):
    tokenizer = served.role.parts.backend.serving().tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TOOLS)
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 7}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "8"},
    ]
    answer = await served.client.chat.completions.create(
        model="policy",
        messages=messages,
        tools=[{"type": "function", "function": {"name": "add", "parameters": {}}}],
        max_tokens=2,
        extra_body={"return_token_ids": True},
    )
    wanted = tokenizer("[add]<u>1+1=<a>add(7)<t>8<a>", add_special_tokens=False)["input_ids"]
    assert answer.choices[0].prompt_token_ids == wanted


@pytest.mark.parametrize(
    ("asked", "status", "param", "text"),
    [
        ({"model": "gpt-4"}, 404, "model", "there is no model 'gpt-4' here; there is 'policy'"),
        ({"n": 0}, 400, "n", "greater than or equal to 1"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
        ({"presence_penalty": 0.5}, 400, None, "presence_penalty=0.5 is not supported here"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "chat template says nothing of tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, 400, None, "tool_choice='required' is not"),
        ({"top_logprobs": 3}, 400, None, "top_logprobs=3 needs logprobs=true"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs", "less than or equal to 20"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, 400, "messages", "not a call of a function"),
        ({"temprature": 1}, 400, "temprature", "Extra inputs are not permitted"),
        ({"messages": []}, 400, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": "1" * 200}]}, 400, "prompt", "this run's engine takes 1 to 127"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "type image_url"),
    ],
)
async def test_refusals_have_openais_shape(served, asked, status, param, text):
    body = {"model": "policy", "messages": MESSAGES, **asked}
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as client:
        answer = await client.post(f"{served.base}/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert text in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


async def test_nobody_gets_in_without_the_token(served, monkeypatch):
    async with client_of(served.base, "wrong") as stranger:
        with pytest.raises(openai.AuthenticationError, match="the token is missing or wrong"):
            await stranger.models.list()
    with pytest.raises(openai.BadRequestError, match="token id 99: the vocabulary has 64"):
        await served.client.completions.create(model="policy", prompt=[99])
    monkeypatch.setattr("services.rollout.openai.endpoint.MAX_STOP_IDS", 4)
    for stops, text in (([99], "token id 99: the vocabulary has 64"), ([4, 5, 6, 7], "5 stop tokens")):
        extra = {"stop_token_ids": stops, "min_tokens": 1}
        with pytest.raises(openai.BadRequestError, match=text):
            await served.client.completions.create(model="policy", prompt=PROMPT, extra_body=extra)
    with pytest.raises(openai.BadRequestError, match=r"temperature=0.001: 0 for what is most likely, or 0.01"):
        await served.client.completions.create(model="policy", prompt=PROMPT, temperature=0.001)
    with pytest.raises(openai.NotFoundError):
        await served.client.embeddings.create(model="policy", input="x")


async def test_a_caller_that_leaves_frees_its_slot(served, monkeypatch):
    monkeypatch.setattr(http, "GONE_SECONDS", 0.05)
    backend = served.role.parts.backend._backend
    asked = served.client.completions.create(model="policy", prompt=PROMPT, max_tokens=100, n=50, timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        await asked
    async with asyncio.timeout(60):
        while backend._decoder.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_full_replica_says_so(served, monkeypatch):
    monkeypatch.setattr(app_module, "MAX_JOBS", 1)
    # Long enough for the others to come while the first one is answered.
    asked = {"model": "policy", "prompt": PROMPT, "max_tokens": 120, "extra_body": {"min_tokens": 120}}
    outcomes = await asyncio.gather(
        *(served.client.completions.create(**asked) for _ in range(4)), return_exceptions=True
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, openai.RateLimitError)]
    assert (len(refused), sum(not isinstance(outcome, Exception) for outcome in outcomes)) == (3, 1)
    assert (await served.client.completions.create(**asked)).choices


async def test_weights_change_in_the_middle_of_an_answer(config, model, monkeypatch):
    async with (
        served_rollout("memory://openai-sync", config) as (served, base),
        _actor() as actor,
        client_of(base) as client,
    ):
        ref = actor.publish(1, _weights(model), run="r")
        await _prepare(served, ref)
        # Slow enough for the commit to come before its end.
        decoder = served.parts.backend._backend._decoder
        monkeypatch.setattr(decoder, "step", lambda step=decoder.step: time.sleep(0.03) or step())
        seen = []
        stream = await client.completions.create(
            model="policy", prompt=PROMPT, max_tokens=100, stream=True, seed=2, extra_body={"min_tokens": 100}
        )
        async for event in stream:
            if not seen:
                # Served between two pieces of the row: it waits for no more than one.
                await asyncio.wait_for(_commit(served, 1, ref.digest), 30)
            seen += [version for version, count in event.choices[0].weight_versions for _ in range(count)]
        assert len(seen) == 100
        assert seen == sorted(seen)
        assert {0, 1} == set(seen)
        assert (await client.models.list()).data[0].weight_version == 1


async def test_no_run_no_policy():
    async with fake_role(build, RolloutSettings, redis_url="memory://openai-none", threads=1):
        [replica] = await list_replicas(open_store("memory://openai-none"), "rollout")
        async with client_of(f"http://{replica.facts['openai']}") as client:
            with pytest.raises(openai.InternalServerError, match="no run is loaded") as caught:
                await client.models.list()
            assert caught.value.status_code == 503


async def test_training_rows_do_not_notice(served):
    """The same rows with and without callers of the endpoint beside them."""
    _, before = await _generate(served.role, _prompts(0, samples=range(8)))
    noise = [
        asyncio.create_task(served.client.completions.create(model="policy", prompt=PROMPT[:k], max_tokens=60, n=2))
        for k in (1, 2, 3, 4)
    ]
    _, during = await _generate(served.role, _prompts(0, samples=range(8)))
    await asyncio.gather(*noise)
    assert during.digest() == before.digest()
