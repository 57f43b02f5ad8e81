"""Samples that a budget cuts, over real servers: what they keep, who can go on with them, and what that gives."""

import json

import numpy as np
import pytest
import torch

from services.rollout.__main__ import build
from services.rollout.settings import RolloutSettings
from shared.batch import refs
from shared.batch.columns import RowKey
from shared.batch.reader import BatchReader
from shared.gen.sextet.v1 import rollout_pb2, rollout_pb2_grpc
from shared.rpc.client import call
from tests.contract.test_rollout_backends import ENGINES
from tests.contract.test_rollout_service import _actor, _commit, _configure, _operation, _prepare, _weights
from tests.fakes.role import fake_role
from tests.fakes.rollout import rollout_config
from tests.fakes.tiny import write_tiny_llama

torch.set_num_threads(1)
LIMIT = 12
REPEATED = ["response_ids", "versions", "finish"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("partial-model"), head_dim=32)


@pytest.fixture(scope="module", params=ENGINES)
def config(request, model, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + {i}="}) + "\n" for i in range(4)))
    return rollout_config(
        model, f"rollout.max_tokens={LIMIT}", "rollout.min_tokens=7", f"rollout.engine={request.param}", data=str(path)
    )


async def generate(served, step, *, budget=0, earlier=None, keys=None):
    """All rows of four prompts drawn in step 1, or `keys`; the answer and its block."""
    keys = keys or [RowKey(f"1:{i}:{i}", sample) for i in range(4) for sample in range(2)]
    prompts = [
        rollout_pb2.PromptRow(uid=key.uid, index=int(key.uid.split(":")[1]), samples=[key.sample], step=1)
        for key in keys
    ]
    request = rollout_pb2.GenerateRequest(
        operation=_operation("rollout.generate", step=step), prompts=_joined(prompts), budget=budget, earlier=earlier
    )
    answer = await call(rollout_pb2_grpc.RolloutServiceStub(served.channel).Generate, request, timeout=60)
    block = await BatchReader(served.connections, None).read(refs.merge(answer.block), timeout=30)
    return answer, block.select(sorted(block.rows))


def _joined(prompts):
    by_uid = {}
    for prompt in prompts:
        if prompt.uid in by_uid:
            by_uid[prompt.uid].samples.extend(prompt.samples)
        else:
            by_uid[prompt.uid] = prompt
    return list(by_uid.values())


def cut_keys(answer):
    return [refs.keys_of(answer.block.rows)[place] for place in answer.cut]


async def test_going_on_gives_what_would_have_been_and_counts_each_token_once(config):
    async with (
        fake_role(build, RolloutSettings, threads=1) as served,
        fake_role(build, RolloutSettings, threads=1) as other,
    ):
        for replica in (served, other):
            await _configure(replica, config)
        # In a step of its own: what is finished in a step is not drawn again in it.
        whole_answer, whole = await generate(served, 9)
        assert list(whole_answer.cut) == []
        rows, tokens, rounds, left, earlier = {}, 0, 0, None, None
        while left is None or left:
            # Replicas take turns: whoever goes on reads the rows from who made them.
            replica, step = (served, other)[rounds % 2], 1 + rounds
            answer, block = await generate(replica, step, budget=5, earlier=earlier, keys=left)
            tokens, rounds = tokens + answer.metrics["response_tokens"], rounds + 1
            rows |= {key: block.select([key]) for key in block.rows}
            left = cut_keys(answer)
            lengths = dict(zip(block.rows, block["response_ids"].lengths, strict=True))
            assert all(lengths[key] == 5 * rounds for key in left)
            finishes = dict(zip(block.rows, block["finish"].texts(), strict=True))
            assert {key for key, finish in finishes.items() if finish == "aborted"} == set(left)
            earlier = refs.select_rows(answer.block, left) if left else None
        assert rounds >= 2
        assert tokens == whole_answer.metrics["response_tokens"]
        for key, row in rows.items():
            expected = whole.select([key])
            for name in ("prompt_ids", "response_ids", "response_mask", "finish", "response"):
                assert np.array_equal(row[name].data, expected[name].data), (key, name)
            # A prompt that is read as a whole and one that was decoded differ in the last bits.
            assert np.allclose(row["rollout_logprobs"].data, expected["rollout_logprobs"].data, atol=1e-5)


async def test_each_token_keeps_the_version_and_log_prob_of_who_sampled_it(config, model):
    async with _actor() as actor, fake_role(build, RolloutSettings, threads=1) as served:
        await _configure(served, config)
        first, before = await generate(served, 1, budget=5)
        left = cut_keys(first)
        assert left
        ref = actor.publish(3, _weights(model), run="r")
        await _prepare(served, ref)
        await _commit(served, 3, ref.digest)
        answer, after = await generate(served, 2, earlier=refs.select_rows(first.block, left), keys=left)
        assert list(answer.oldest) == [0] * len(left)
        assert list(answer.cut) == []
        for key in left:
            old, new = before.select([key]), after.select([key])
            assert new["response_ids"].data[:5].tolist() == old["response_ids"].data.tolist()
            assert new["rollout_logprobs"].data[:5].tobytes() == old["rollout_logprobs"].data.tobytes()
            versions = new["versions"].data.tolist()
            assert versions[:5] == [0] * 5
            assert set(versions[5:]) == {3}
        again, same = await generate(served, 3, earlier=refs.select_rows(first.block, left), keys=left)
        assert same.select(columns=REPEATED).digest() == after.select(columns=REPEATED).digest()
        assert list(again.oldest) == [0] * len(left)
