"""An agent over the gateway: two rollouts, one URL; its conversations become a batch that a real actor trains on."""

import asyncio
import base64
import contextlib
import json
from collections import Counter
from dataclasses import dataclass

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from services.actor import __main__ as actor_main
from services.actor.settings import ActorSettings
from services.rollout.__main__ import build
from services.rollout.settings import RolloutSettings
from shared.batch import refs
from shared.batch.reader import BatchReader
from shared.config import dump_config
from shared.gen.sextet.v1 import actor_pb2, actor_pb2_grpc, batch_pb2, common_pb2, role_pb2, rollout_pb2
from shared.gen.sextet.v1 import rollout_pb2_grpc as rollout_grpc
from shared.rpc.client import call
from shared.state import open_store
from shared.state.registry import Registration, ReplicaState, list_replicas
from tests.fakes.chat import FORGETFUL, write_chat_llama
from tests.fakes.gateway import gateway
from tests.fakes.role import TOKEN, RunningRole, fake_role
from tests.fakes.rollout import rollout_config

torch.set_num_threads(1)
pytestmark = pytest.mark.asyncio(loop_scope="module")
STORE = "memory://agents"
QUESTION = {"role": "user", "content": "2+3="}
MAX_TOKENS = 10


def operation(name, step=1):
    return common_pb2.Operation(id=common_pb2.OperationId(run="r", step=step, name=name, part="0"), epoch=1)


async def configure(role, config):
    request = role_pb2.ConfigureRequest(operation=operation("configure", 0), config_json=dump_config(config))
    await call(role.role.Configure, request, timeout=60)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("agents")
    (root / "d.jsonl").write_text(json.dumps({"prompt": [QUESTION], "data_source": "s"}) + "\n")
    model = write_chat_llama(root / "model")
    more = (
        "rollout.context=128", f"rollout.max_tokens={MAX_TOKENS}", "rollout.n=4", "actor.optimizer.lr=0.05",
        "algorithm.advantage=grpo", "flow=grpo",
    )  # fmt: skip
    return rollout_config(model, *more, data=str(root / "d.jsonl"))


@dataclass(frozen=True)
class Pool:
    rollouts: dict[str, RunningRole]
    base: str
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient


@contextlib.asynccontextmanager
async def pool_in(store, config):
    options = {"redis_url": store, "threads": 1, "lease_ttl": 3}
    async with (
        fake_role(build, RolloutSettings, replica="r0", **options) as first,
        fake_role(build, RolloutSettings, replica="r1", **options) as second,
    ):
        # One after the other: transformers can't load two models in one process at once.
        for role in (first, second):
            await configure(role, config)
        async with (
            gateway(store) as base,
            openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=TOKEN, max_retries=0) as client,
            httpx.AsyncClient(base_url=base, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as http,
        ):
            made = Pool({"r0": first, "r1": second}, base, client, http)
            async with asyncio.timeout(60):
                while {await replica_of_a_session(made) for _ in range(12)} != {"r0", "r1"}:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(config):
    async with pool_in(STORE, config) as made:
        yield made


async def replica_of_a_session(pool):
    """Where a new session is, which is gone again; "" for none: the gateway looks at the registry twice a second."""
    answer = await pool.http.post("/v1/sessions", json={})
    if answer.status_code != 200:
        return ""
    id = answer.json()["id"]
    await pool.http.delete(f"/v1/sessions/{id}")
    return id.partition(".")[0]


def chat(pool, session):
    return pool.client.with_options(base_url=f"{pool.base}{session['base_url']}")


async def start(pool, **about):
    return (await pool.http.post("/v1/sessions", json=about)).json()


async def play(pool, session, turns=2):
    """An agent with a tool: asks, shows the tool's answer, asks again."""
    messages = [QUESTION]
    for turn in range(turns):
        answer = await chat(pool, session).chat.completions.create(
            model="policy", messages=messages, extra_body={"return_token_ids": True}
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "tool", "content": f"#{turn}: 5"})
    return messages


async def test_one_url_balances_and_keeps_conversations_together(pool, monkeypatch):
    asked: Counter[str] = Counter()

    def counted(name, generate):
        def count(requests):
            asked[name] += len(requests)
            return generate(requests)

        return count

    for name, role in pool.rollouts.items():
        backend = role.parts.backend._backend
        monkeypatch.setattr(backend, "generate", counted(name, backend.generate))
    calls = [pool.client.completions.create(model="policy", prompt=[4 + k, 5], max_tokens=2) for k in range(30)]
    await asyncio.gather(*calls)
    assert asked.total() == 30
    assert min(asked["r0"], asked["r1"]) >= 6
    for question in ("1+1=", "2+2=", "3+3="):
        asked.clear()
        messages = [{"role": "user", "content": question}]
        for _ in range(3):
            await pool.client.chat.completions.create(model="policy", messages=messages, max_tokens=1)
            messages += [{"role": "assistant", "content": "a"}, QUESTION]
        assert sorted(asked.values()) == [3]


async def test_the_answer_does_not_depend_on_who_gives_it(pool):
    asked = {"model": "policy", "prompt": [7, 8, 9], "seed": 5, "max_tokens": 8}
    direct = []
    for replica in await list_replicas(open_store(STORE), "rollout"):
        base = f"http://{replica.facts['openai']}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=TOKEN) as client:
            direct.append((await client.completions.create(**asked)).choices[0].text)
    through = await pool.client.completions.create(**asked)
    streamed = "".join(
        [event.choices[0].text async for event in await pool.client.completions.create(**asked, stream=True)]
    )
    assert {*direct, through.choices[0].text, streamed} == {direct[0]}


async def test_refusals_come_through_as_they_are(pool):
    with pytest.raises(openai.BadRequestError, match="token id 99"):
        await pool.client.completions.create(model="policy", prompt=[99])
    with pytest.raises(openai.NotFoundError, match="no model 'x'"):
        await pool.client.completions.create(model="x", prompt="1")
    async with openai.AsyncOpenAI(base_url=f"{pool.base}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    for session in ("r9.0", "r0.0"):
        assert (await pool.http.get(f"/v1/sessions/{session}")).status_code == 404


async def test_a_session_samples_as_its_run_does(pool):
    session = await start(pool)
    for asked, text in (({"temperature": 0.5}, "temperature=1.0, not 0.5"), ({"n": 2}, "one answer, not n=2")):
        with pytest.raises(openai.BadRequestError, match=text):
            await chat(pool, session).chat.completions.create(model="policy", messages=[QUESTION], **asked)
    empty = await pool.http.post("/v1/sessions/export", json={"sessions": [session["id"]], "step": 1})
    assert (empty.status_code, "has no turn" in empty.text) == (400, True)
    assert (await pool.http.delete(f"/v1/sessions/{session['id']}")).status_code == 204
    assert (await pool.http.get(f"/v1/sessions/{session['id']}")).status_code == 404


async def test_two_turns_are_exported_and_trained_on(pool, config):
    """Turns, rewards, export; then advantages and an update by a real actor, and the new weights answer."""
    sessions = [await start(pool, uid="task", sample=k, data_source="sums", ground_truth="5") for k in range(4)]
    conversations = await asyncio.gather(*(play(pool, session) for session in sessions))
    looks = []
    for k, session in enumerate(sessions):
        await pool.http.post(f"/v1/sessions/{session['id']}/reward", json={"reward": float(k % 2)})
        looks.append((await pool.http.get(f"/v1/sessions/{session['id']}")).json())
    exported = (
        await pool.http.post("/v1/sessions/export", json={"sessions": [s["id"] for s in sessions], "step": 1})
    ).json()
    assert exported["failed"] == []
    ref = batch_pb2.BatchRef.FromString(base64.b64decode(exported["batch"]))
    first = next(iter(pool.rollouts.values()))
    block = await BatchReader(first.connections, None).read(ref, timeout=20)
    assert sorted((row.uid, row.sample) for row in block.rows) == [("task", k) for k in range(4)]
    lm = AutoModelForCausalLM.from_pretrained(config.model.path)
    for place, key in enumerate(block.rows):
        row = {name: column.rows()[place] for name, column in block.columns.items() if name != "response"}
        _check_row(lm, row, looks[key.sample], conversations[key.sample])
        assert (row["score"][0], row["valid"][0]) == (key.sample % 2, 1)
    assert block["data_source"].texts() == ["sums"] * 4

    async with fake_role(actor_main.build, ActorSettings, redis_url="memory://agents-actor", threads=1) as actor:
        await configure(actor, config)
        stub = actor_pb2_grpc.ActorServiceStub(actor.channel)
        score = actor_pb2.ActorServiceComputeLogprobsRequest(operation=operation("actor.logprobs"), inputs=ref)
        old = (await call(stub.ComputeLogprobs, score, timeout=60)).block
        joined = refs.merge(ref, old)
        request = actor_pb2.ComputeAdvantagesRequest(operation=operation("actor.advantages"), inputs=joined)
        advantages = await call(stub.ComputeAdvantages, request, timeout=60)
        batch = batch_pb2.BatchRef(blocks=[advantages.block])
        trained = await BatchReader(actor.connections, None).read(batch, timeout=20)
        loss_on = trained["response_mask"].rows()
        by_key = dict(zip(block.rows, block["response_mask"].rows(), strict=True))
        for key, mask in zip(trained.rows, loss_on, strict=True):
            assert mask.tolist() == by_key[key].tolist()
        update = await call(
            stub.Update,
            actor_pb2.ActorServiceUpdateRequest(operation=operation("actor.update"), inputs=batch),
            timeout=60,
        )
        assert update.version == 1
        assert update.metrics["grad_norm"] > 0
        publish = actor_pb2.PublishWeightsRequest(operation=operation("actor.publish_weights"))
        weights = (await call(stub.PublishWeights, publish, timeout=60)).weights
        for role in pool.rollouts.values():
            rollout = rollout_grpc.RolloutServiceStub(role.channel)
            prepare = rollout_pb2.PrepareWeightsRequest(operation=operation("prepare"), weights=weights)
            await call(rollout.PrepareWeights, prepare, timeout=60)
            commit = rollout_pb2.CommitWeightsRequest(
                operation=operation("commit"), version=weights.version, digest=weights.digest
            )
            await call(rollout.CommitWeights, commit, timeout=60)
    answer = await pool.client.completions.create(model="policy", prompt=[4, 5], max_tokens=3)
    assert answer.weight_version == 1


def _check_row(lm, row, look, conversation):
    """Ids, mask, versions and log-probs of an exported row, against the conversation and the model itself."""
    [shown] = look["rows"]
    assert shown["response_ids"] == row["response_ids"].tolist()
    mask, ids = row["response_mask"].astype(bool), row["response_ids"]
    assert set(row["versions"].tolist()) == {0}
    # Two answers of the policy, and between them what the tool and the template said.
    changes = np.flatnonzero(np.diff(mask.astype(int)))
    assert mask[0]
    assert mask[-1]
    assert len(changes) == 2
    assert (row["rollout_logprobs"][~mask] == 0).all()
    given = ids[~mask]
    assert len(given) >= len("<t>#0: 5<a>")
    logits = lm(torch.tensor([[*row["prompt_ids"].tolist(), *ids.tolist()]])).logits[0, len(row["prompt_ids"]) - 1 : -1]
    wanted = torch.log_softmax(logits.double(), -1)[torch.arange(len(ids)), torch.tensor(ids).long()].detach().numpy()
    np.testing.assert_allclose(row["rollout_logprobs"][mask], wanted[mask], atol=1e-4)
    assert conversation[0] == QUESTION


async def test_a_template_that_rewrites_history_splits_the_sample(tmp_path, config):
    """What stands before a # is left out of history: later turns can't go on from the ids that were sampled."""
    model = write_chat_llama(tmp_path / "model", FORGETFUL)
    changed = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    options = {"redis_url": "memory://agents-split", "threads": 1, "replica": "r0"}
    async with fake_role(build, RolloutSettings, **options) as role:
        await configure(role, changed)
        [replica] = await list_replicas(open_store("memory://agents-split"), "rollout")
        base = f"http://{replica.facts['openai']}"
        async with httpx.AsyncClient(base_url=base, headers={"authorization": f"Bearer {TOKEN}"}) as http:
            session = (await http.post("/v1/sessions", json={"uid": "t"})).json()
            messages = [QUESTION]
            for turn in range(3):
                body = {"model": "policy", "messages": messages, "seed": turn, "stop": ["#"] if turn == 1 else None}
                answer = (await http.post(f"{session['base_url']}/chat/completions", json=body)).json()
                said = answer["choices"][0]["message"]["content"]
                # After the second answer the template takes something away that was sampled.
                said = f"{said[:2]}#{said[2:]}" if turn == 1 else said
                messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "1"}]
            look = (await http.get(f"/v1/sessions/{session['id']}")).json()
    assert look["turns"] == 3
    assert look["samples"] >= 2
    assert [row["uid"] for row in look["rows"]] == ["t", "t|1", "t|2"][: look["samples"]]
    assert set(look["rows"][-1]["response_mask"]) == {1}


async def test_a_replica_that_is_listed_but_gone_is_passed_over(pool):
    """As one that was killed a moment ago: its lease lives on. What only it had is named."""
    about = ReplicaState("r", 9, facts={"openai": "127.0.0.1:9"})
    ghost = Registration(open_store(STORE), "rollout", "ghost", "127.0.0.1:9", "x", lambda: about, 30.0, {})
    versions = [replica.version for replica in await list_replicas(open_store(STORE), "rollout")]
    about = ReplicaState("r", max(versions), facts={"openai": "127.0.0.1:9"})
    await ghost.start()
    await asyncio.sleep(0.7)
    asked = [pool.client.completions.create(model="policy", prompt=[k + 4, 11], max_tokens=1) for k in range(20)]
    assert all(answer.choices for answer in await asyncio.gather(*asked))
    session = await start(pool)
    await play(pool, session, turns=1)
    body = {"sessions": [session["id"], "ghost.1"], "step": 2}
    exported = (await pool.http.post("/v1/sessions/export", json=body)).json()
    await ghost.stop()
    assert [row["sample"] for row in exported["rows"]] == [0]
    assert [(each["sessions"], each["error"]["message"]) for each in exported["failed"]] == [
        (["ghost.1"], "replica 'ghost' is gone")
    ]


@pytest_asyncio.fixture(loop_scope="module")
async def own_pool(config):
    """For a test that leaves it with one replica: others may come after it."""
    async with pool_in("memory://agents-dead", config) as made:
        yield made


async def test_a_dead_replicas_requests_go_to_the_other(own_pool):
    pool, gone = own_pool, own_pool.rollouts["r1"]
    begun = [await start(pool) for _ in range(12)]
    session = next(each for each in begun if each["id"].startswith("r1."))
    gone.stop.set()
    await asyncio.wait_for(asyncio.shield(gone.served), 60)
    answers = [await pool.client.completions.create(model="policy", prompt=[k + 4, 9], max_tokens=1) for k in range(6)]
    assert all(answer.choices for answer in answers)
    lost = await pool.http.get(f"/v1/sessions/{session['id']}")
    assert lost.status_code == 404
    assert lost.json()["error"]["code"] == "session_lost"


async def test_without_a_run_there_is_no_policy():
    async with (
        gateway("memory://agents-none") as base,
        openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=TOKEN, max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="no rollout serves a policy now"):
            await client.models.list()
