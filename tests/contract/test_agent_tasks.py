"""Generate in a run whose samples are conversations: agents claim tasks through the gateway and play them."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from services.rollout.__main__ import build
from services.rollout.openai.sessions import Session
from services.rollout.settings import RolloutSettings
from shared.batch import columns
from shared.batch.reader import BatchReader
from shared.batch.refs import keys_of
from shared.config import dump_config
from shared.gen.sextet.v1 import batch_pb2, common_pb2, role_pb2, rollout_pb2
from shared.gen.sextet.v1 import rollout_pb2_grpc as rollout_grpc
from shared.rpc.client import call
from shared.rpc.errors import FailedPrecondition
from tests.fakes.chat import FORGETFUL, write_chat_llama
from tests.fakes.gateway import gateway
from tests.fakes.role import TOKEN, RunningRole, fake_role
from tests.fakes.rollout import rollout_config

torch.set_num_threads(1)
pytestmark = pytest.mark.asyncio(loop_scope="module")
STORE = "memory://tasks"
N, PATIENCE = 2, 60.0


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("tasks")
    rows = [
        {"prompt": [{"role": "user", "content": f"{k}+1="}], "data_source": "s", "extra_info": {"k": k}}
        for k in range(4)
    ]
    (root / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = (
        f"rollout.n={N}", "rollout.agents=true", "rollout.context=128", "rollout.max_tokens=6", "flow=grpo",
        "algorithm.advantage=grpo", "reward={backend: agents}", f"rollout.agent_timeout={PATIENCE}",
    )  # fmt: skip
    return rollout_config(write_chat_llama(root / "model"), *more, data=str(root / "d.jsonl"))


@dataclass(frozen=True)
class Pool:
    rollouts: dict[str, RunningRole]
    http: httpx.AsyncClient

    async def generate(self, replica, step, indices, **more):
        """A Generate call, and the block that it made."""
        operation = common_pb2.Operation(
            id=common_pb2.OperationId(run="r", step=step, name="rollout.generate", part=f"{indices}"), epoch=1
        )
        drawn = more.pop("drawn", step)
        prompts = [
            rollout_pb2.PromptRow(uid=f"{drawn}:{index}:0", index=index, samples=range(N), step=drawn)
            for index in indices
        ]
        request = rollout_pb2.GenerateRequest(operation=operation, prompts=prompts, **more)
        role = self.rollouts[replica]
        answer = await call(rollout_grpc.RolloutServiceStub(role.channel).Generate, request, timeout=60)
        block = await BatchReader(role.connections, None).read(batch_pb2.BatchRef(blocks=[answer.block]), timeout=20)
        return answer, block.select(keys_of(answer.block.rows))


async def configure(role, config):
    operation = common_pb2.Operation(id=common_pb2.OperationId(run="r", step=0, name="configure", part="0"), epoch=1)
    request = role_pb2.ConfigureRequest(operation=operation, config_json=dump_config(config))
    return await call(role.role.Configure, request, timeout=60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(config, tmp_path_factory):
    options = {"redis_url": STORE, "threads": 1, "lease_ttl": 3, "data_dir": tmp_path_factory.mktemp("data")}
    async with (
        fake_role(build, RolloutSettings, replica="r0", **options) as first,
        fake_role(build, RolloutSettings, replica="r1", **options) as second,
    ):
        for role in (first, second):
            configured = await configure(role, config)
            assert configured.facts["batch_invariant"] == "false"
        async with (
            gateway(STORE) as base,
            httpx.AsyncClient(base_url=base, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as http,
        ):
            async with asyncio.timeout(60):
                while (await http.get("/v1/models")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            yield Pool({"r0": first, "r1": second}, http)


async def claim(pool, seconds=20.0):
    answer = await pool.http.post("/v1/sessions/claim", json={"seconds": seconds})
    return answer.json() if answer.status_code == 200 else None


async def say(pool, session, messages):
    body = {"model": "policy", "messages": messages}
    answer = await pool.http.post(f"{session['base_url']}/chat/completions", json=body)
    if answer.status_code == 404:
        raise LookupError(answer.text)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def play(pool, session, turns=2):
    """A conversation with a tool, graded by whether its task's number is even."""
    task = session["task"]
    messages = list(task["prompt"])
    for turn in range(turns):
        messages.append({"role": "assistant", "content": await say(pool, session, messages)})
        messages.append({"role": "tool", "content": f"#{turn}"})
    reward = float(task["extra_info"]["k"] % 2 == 0)
    graded = await pool.http.post(f"/v1/sessions/{session['id']}/reward", json={"reward": reward})
    assert graded.status_code == 200, graded.text


@contextlib.asynccontextmanager
async def agents(pool, count, turns=2):
    """So many agents, at work meanwhile; yields the tasks that each had."""
    had: Counter[tuple[str, int]] = Counter()

    over = asyncio.Event()

    async def work():
        while not over.is_set():
            if session := await claim(pool, 1.0):
                had[session["task"]["uid"], session["task"]["sample"]] += 1
                with contextlib.suppress(LookupError):
                    await play(pool, session, turns)

    working = [asyncio.create_task(work()) for _ in range(count)]
    try:
        yield had
    finally:
        # A claim that is cut off may get a task all the same, for a moment.
        over.set()
        await asyncio.gather(*working)


async def test_agents_of_one_url_make_the_rows_of_two_replicas(pool, config):
    """Every row once, exact: ids, masks, log-probs by the model itself; rewards where graders find them."""
    async with agents(pool, 3) as had:
        made = await asyncio.gather(pool.generate("r0", 1, [0, 1]), pool.generate("r1", 1, [2, 3]))
    lm = AutoModelForCausalLM.from_pretrained(config.model.path)
    for (answer, block), indices in zip(made, ([0, 1], [2, 3]), strict=True):
        assert block.rows == tuple((f"1:{index}:0", sample) for index in indices for sample in range(N))
        assert (list(answer.oldest), list(answer.cut)) == ([0] * 4, [])
        assert (answer.metrics["turns"], answer.metrics["split_rows"]) == (2, 0)
        assert set(columns.SAMPLE_COLUMNS) == set(block.columns)
        for place, key in enumerate(block.rows):
            _check_row(lm, {name: block[name].rows()[place] for name in NUMBERS})
            info = json.loads(block[columns.EXTRA_INFO].texts()[place])
            index = indices[place // N]
            assert info == {"k": index, "agent": {"reward": float(index % 2 == 0), "turns": 2}}
            assert key.prompt == f"1:{index}:0"
    assert set(had.values()) == {1}
    assert len(had) == 8


NUMBERS = (columns.PROMPT_IDS, columns.RESPONSE_IDS, columns.RESPONSE_MASK, columns.ROLLOUT_LOGPROBS, columns.VERSIONS)


def _check_row(lm, row):
    mask, ids, prompt = row["response_mask"].astype(bool), row["response_ids"], row["prompt_ids"]
    assert (mask[0], mask[-1], len(np.flatnonzero(np.diff(mask.astype(int))))) == (True, True, 2)
    logits = lm(torch.tensor([[*prompt.tolist(), *ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits.double(), -1)[torch.arange(len(ids)), torch.tensor(ids).long()].detach().numpy()
    np.testing.assert_allclose(row["rollout_logprobs"][mask], wanted[mask], atol=1e-4)
    assert (row["rollout_logprobs"][~mask] == 0).all()


async def test_the_same_task_is_sampled_the_same_and_a_finished_one_never_again(pool):
    """Seeds are the task's; what is on disk answers without an agent, also on another replica."""
    async with agents(pool, 2) as had:
        _, first = await pool.generate("r0", 2, [0])
    assert len(had) == N
    _, again = await pool.generate("r1", 2, [0])
    assert again.digest() == first.digest()
    # As after a rollback, when its prompt was in flight.
    _, later = await pool.generate("r1", 3, [0], drawn=2)
    assert later.digest() == first.digest()
    async with agents(pool, 1):
        _, looked = await pool.generate("r0", 6, [0], greedy=True)
    assert looked["response_ids"].rows()[0].tolist() == looked["response_ids"].rows()[1].tolist()
    assert first["response_ids"].rows()[0].tolist() != first["response_ids"].rows()[1].tolist()


@pytest.fixture
def impatient(monkeypatch):
    """Two seconds are PATIENCE."""
    idle = property(lambda session: 0.0 if session.answering else (time.monotonic() - session.used) * PATIENCE / 2)
    monkeypatch.setattr(Session, "idle", idle)


@pytest.mark.usefixtures("impatient")
async def test_a_task_of_an_agent_that_left_goes_to_another(pool):
    """One gives it back, one is never heard of again: nobody waits for them, and the late one is told."""
    making = asyncio.create_task(pool.generate("r0", 3, [0]))
    gone, back = await claim(pool), await claim(pool)
    await say(pool, gone, gone["task"]["prompt"])
    assert (await pool.http.delete(f"/v1/sessions/{back['id']}")).status_code == 204
    async with agents(pool, 1) as had:
        await making
    assert set(had) == {("3:0:0", 0), ("3:0:0", 1)}
    late = await pool.http.post(f"/v1/sessions/{gone['id']}/reward", json={"reward": 1.0})
    assert late.status_code == 404


@pytest.mark.usefixtures("impatient")
async def test_agents_that_never_say_a_word_end_the_call(pool):
    making = asyncio.create_task(pool.generate("r0", 4, [1]))
    while not making.done():
        await claim(pool, 1.0)
    with pytest.raises(FailedPrecondition, match="3 agents took it and did not come back"):
        await making
    assert await claim(pool, 0.0) is None


async def test_what_can_not_be_is_said(pool):
    making = asyncio.create_task(pool.generate("r0", 5, [2]))
    session = await claim(pool)
    refused = await pool.http.post(f"/v1/sessions/{session['id']}/reward", json={"reward": 1.0})
    assert (refused.status_code, "has no turn" in refused.text) == (400, True)
    exported = await pool.http.post("/v1/sessions/export", json={"sessions": [session["id"]], "step": 1})
    assert exported.status_code == 400
    for seconds in (-1, 31, "x", None):
        assert (await pool.http.post("/v1/sessions/claim", json={"seconds": seconds})).status_code == 400
    await play(pool, session, turns=1)
    async with agents(pool, 1):
        answer, block = await making
    assert answer.metrics["turns"] == 1.5
    assert [json.loads(info)["agent"]["turns"] for info in block["extra_info"].texts()].count(1) == 1


async def test_rewritten_history_makes_several_rows_of_one_group(tmp_path, config):
    """A template that leaves out what stands before a #: the later turn is a row of its own, of the same prompt."""
    model = write_chat_llama(tmp_path / "model", FORGETFUL)
    changed = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    options = {"redis_url": "memory://tasks-split", "threads": 1, "replica": "r0"}
    async with fake_role(build, RolloutSettings, **options) as role:
        await configure(role, changed)
        async with (
            gateway("memory://tasks-split") as base,
            httpx.AsyncClient(base_url=base, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as http,
        ):
            pool = Pool({"r0": role}, http)
            making = asyncio.create_task(pool.generate("r0", 1, [0]))
            for _ in range(N):
                async with asyncio.timeout(60):
                    while not (session := await claim(pool, 1.0)):
                        pass
                messages = list(session["task"]["prompt"])
                said = await say(pool, session, messages)
                edited = {"role": "assistant", "content": f"{said[:1]}#{said[1:]}"}
                await say(pool, session, [*messages, edited, {"role": "user", "content": "1"}])
                await http.post(f"/v1/sessions/{session['id']}/reward", json={"reward": 1})
            answer, block = await making
    assert [tuple(key) for key in block.rows] == [("1:0:0", 0), ("1:0:0|1", 0), ("1:0:0", 1), ("1:0:0|1", 1)]
    assert {key.prompt for key in block.rows} == {"1:0:0"}
    assert answer.metrics["split_rows"] == N
    assert {mask.all() for mask in block["response_mask"].rows()} == {True}
