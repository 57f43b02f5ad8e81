"""Agents and an engine that shares its GPU (rollout.agents, rollout.sleep): it does not sleep in a conversation.

The engine only keeps vLLM's rules; everything before it is real: gRPC, HTTP, sessions, the backend.
"""

import asyncio
import json

import httpx
import pytest

from services.rollout.__main__ import build
from services.rollout.settings import RolloutSettings
from shared.gen.sextet.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
from shared.rpc.client import call
from shared.state import open_store
from shared.state.registry import list_replicas
from tests.contract.test_rollout_service import _configure
from tests.fakes.chat import write_chat_llama
from tests.fakes.role import TOKEN, fake_role
from tests.fakes.rollout import rollout_config
from tests.fakes.vllm import fake_vllm

STORE = "memory://agents-asleep"
AWAKE = ["weights", "kv_cache"]


def generate(served, step):
    """A Generate call for two conversations."""
    operation = common_pb2.Operation(
        id=common_pb2.OperationId(run="r", step=step, name="rollout.generate", part="0"), epoch=1
    )
    prompts = [rollout_pb2.PromptRow(uid=f"{step}:0:0", index=0, samples=range(2), step=step)]
    request = rollout_pb2.GenerateRequest(operation=operation, prompts=prompts)
    return asyncio.create_task(call(rollout_pb2_grpc.RolloutServiceStub(served.channel).Generate, request, timeout=60))


async def claim(http):
    return (await http.post("/v1/sessions/claim", json={"seconds": 20})).json()


async def say(http, session, messages):
    answer = await http.post(f"{session['base_url']}/chat/completions", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    return [*messages, answer.json()["choices"][0]["message"]]


async def converse(http):
    """Two agents, one turn after the other: while one thinks, nobody asks for a token."""
    sessions = [await claim(http) for _ in range(2)]
    talks = [session["task"]["prompt"] for session in sessions]
    for turn in range(3):
        for place, session in enumerate(sessions):
            talks[place] = await say(http, session, [*talks[place], {"role": "user", "content": f"{turn}"}])
    for session in sessions:
        assert (await http.post(f"/v1/sessions/{session['id']}/reward", json={"reward": 1.0})).status_code == 200


@pytest.mark.timeout(120)
async def test_awake_for_whole_conversations_and_asleep_before_the_step_goes_on(tmp_path, monkeypatch):
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1"}], "data_source": "s"}))
    more = (
        "rollout.engine=vllm", "rollout.sleep=true", "rollout.agents=true", "rollout.context=1000", "flow=grpo",
        "rollout.max_tokens=20", "algorithm.advantage=grpo", "reward={backend: agents}",
    )  # fmt: skip
    config = rollout_config(write_chat_llama(tmp_path / "m"), *more, data=str(tmp_path / "d.jsonl"))
    engine = fake_vllm(monkeypatch)
    monkeypatch.setattr("services.rollout.backends.vllm.length_of", lambda *_: 1000)
    async with fake_role(build, RolloutSettings, redis_url=STORE, threads=1) as served:
        await _configure(served, config)
        assert engine.done == ["sleep 1"]
        [replica] = await list_replicas(open_store(STORE), "rollout")
        base, headers = f"http://{replica.facts['openai']}", {"authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=60) as http:
            making = generate(served, 1)
            await converse(http)
            made = await making
            # Six turns of two pieces each.
            assert engine.done == ["sleep 1", *AWAKE, *["row"] * 12, "sleep 1"]
            assert (made.metrics["turns"], len(made.block.rows)) == (3, 2 + made.metrics["split_rows"])

            # The actor computes. Somebody's question does not take its memory, and is answered in the next turn.
            asked = {"prompt": [4, 5, 6], "max_tokens": 4}
            stray = asyncio.create_task(http.post("/v1/completions", json=asked))
            assert not (await asyncio.wait({stray}, timeout=1))[0]
            assert engine.done[15:] == ["sleep 1"]
            making = generate(served, 2)
            answer = await stray
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
            await converse(http)
            await making
            assert engine.done[16:] == [*AWAKE, *["row"] * 13, "sleep 1"]
            assert engine.asleep
