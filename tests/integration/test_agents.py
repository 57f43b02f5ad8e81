"""A run whose samples are conversations: real services, agents at one URL, and the policy learns what they pay for."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from sextet.client import AsyncClient
from sextet.endpoint import read_state
from shared.rpc.token import client_token
from tests.fakes.chat import write_chat_llama
from tests.fakes.gateway import gateway
from tests.integration.conftest import Home

pytestmark = pytest.mark.timeout(300)
STEPS = 8


async def play(http: httpx.AsyncClient, session: dict[str, Any]) -> None:
    """Two turns, with a tool's answer between them; paid by how many a's the policy said."""
    messages, said = list(session["task"]["prompt"]), ""
    for _ in range(2):
        body = {"model": "policy", "messages": messages}
        answer = await http.post(f"{session['base_url']}/chat/completions", json=body)
        text = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        said += text
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": "1"}]
    reward = said.count("a") / 12
    (await http.post(f"/v1/sessions/{session['id']}/reward", json={"reward": reward})).raise_for_status()


async def work(http: httpx.AsyncClient, over: asyncio.Event) -> None:
    while not over.is_set():
        claimed = await http.post("/v1/sessions/claim", json={"seconds": 1})
        if claimed.status_code == 200:
            await play(http, claimed.json())
        elif claimed.status_code != 204:
            await asyncio.sleep(0.3)


@pytest.mark.parametrize(
    ("flow", "staleness"), [("grpo", 0), pytest.param("async_ppo", 1, marks=pytest.mark.slow)], ids=["grpo", "async"]
)
async def test_agents_teach_the_policy(served: Home, flow: str, staleness: int) -> None:
    """The reward goes up; sampled log-probs are the actor's own, so what is trained on is what was sampled."""
    write_chat_llama(served.path / "chat")
    rows = [{"data_source": "t", "prompt": [{"role": "user", "content": f"{k}+1="}]} for k in range(8)]
    (served.path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = served.config(
        flow=flow,
        total_steps=STEPS,
        model={"path": str(served.path / "chat")},
        data={"path": str(served.path / "chat.jsonl")},
        rollout={"agents": True, "context": 128, "n": 4, "max_tokens": 6, "slots": 16},
        actor={"optimizer": {"lr": 0.01}, "micro_batch_size": 16},
        reward={"backend": "agents", "function": None},
        algorithm={"advantage": "grpo", "staleness": staleness, "kl": {"placement": "none"}},
    )
    state = read_state(served.path / ".sextet")
    assert state is not None
    token = client_token()
    async with (
        gateway(state.redis_url, token) as base,
        httpx.AsyncClient(base_url=base, headers={"authorization": f"Bearer {token}"}, timeout=60) as http,
        AsyncClient(state.controller) as client,
    ):
        run = await client.create_run(config)
        over = asyncio.Event()
        agents = [asyncio.create_task(work(http, over)) for _ in range(8)]
        try:
            steps = [event.metrics async for event in client.watch(run.id) if event.kind == "step"]
        finally:
            over.set()
            await asyncio.wait_for(asyncio.gather(*agents), 60)
        assert (await client.get_run(run.id)).state == "done"
    rewards = [step["reward"] for step in steps]
    assert len(rewards) == STEPS
    assert sum(rewards[-2:]) > 1.5 * sum(rewards[:2]), rewards
    for step in steps:
        assert step["reward.score/count"] == 16
        assert step["actor.advantages/rows_invalid"] == 0
        if not staleness:
            assert step["actor.advantages/rollout_logprob_abs_difference_max"] < 1e-4
