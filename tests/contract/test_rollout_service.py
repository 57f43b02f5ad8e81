"""The rollout service as the controller sees it: real servers, prompts by index, samples and weights by reference."""

import contextlib
import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.rollout.__main__ import build
from services.rollout.settings import RolloutSettings
from shared.batch import refs
from shared.batch.reader import BatchReader
from shared.config import dump_config
from shared.gen.sextet.v1 import common_pb2, role_pb2, rollout_pb2, rollout_pb2_grpc, weights_pb2, weights_pb2_grpc
from shared.rpc.client import call
from shared.rpc.errors import FailedPrecondition, InvalidArgument, NotFound
from shared.rpc.run import RoleParts
from shared.weights.grpc import GrpcFetcher, GrpcPublisher, WeightsServicer
from tests.fakes.role import FakeBackend, fake_role
from tests.fakes.rollout import rollout_config
from tests.fakes.tiny import write_tiny_llama

torch.set_num_threads(1)
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{i} + {i}="}],
        "data_source": "sums",
        "reward_model": {"ground_truth": 2 * i},
    }
    for i in range(5)
]
_parts = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("rollout-model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def _operation(name, run="r", step=1):
    return common_pb2.Operation(
        id=common_pb2.OperationId(run=run, step=step, name=name, part=str(next(_parts))), epoch=1
    )


async def _configure(served, config):
    request = role_pb2.ConfigureRequest(
        operation=_operation("rollout.configure", step=0), config_json=dump_config(config)
    )
    return await call(served.role.Configure, request, timeout=60)


def _prompts(*indices, step=1, samples=(0, 1)):
    return [rollout_pb2.PromptRow(uid=f"{step}:{i}:{k}", index=i, samples=samples) for k, i in enumerate(indices)]


async def _generate(served, prompts, step=1, **options):
    request = rollout_pb2.GenerateRequest(
        operation=_operation("rollout.generate", step=step), prompts=prompts, **options
    )
    answer = await call(rollout_pb2_grpc.RolloutServiceStub(served.channel).Generate, request, timeout=60)
    return answer, await BatchReader(served.connections, None).read(refs.merge(answer.block), timeout=30)


async def _prepare(served, ref):
    request = rollout_pb2.PrepareWeightsRequest(operation=_operation("rollout.prepare_weights"), weights=ref)
    return await call(rollout_pb2_grpc.RolloutServiceStub(served.channel).PrepareWeights, request, timeout=60)


async def _commit(served, version, digest):
    request = rollout_pb2.CommitWeightsRequest(
        operation=_operation("rollout.commit_weights"), version=version, digest=digest
    )
    return await call(rollout_pb2_grpc.RolloutServiceStub(served.channel).CommitWeights, request, timeout=60)


@contextlib.asynccontextmanager
async def _rollout():
    async with fake_role(build, RolloutSettings, threads=1) as served:
        yield served


@contextlib.asynccontextmanager
async def _actor():
    """Something that publishes weights, as the actor does."""
    publisher = GrpcPublisher()
    services = [(weights_pb2_grpc.add_WeightsServiceServicer_to_server, WeightsServicer(publisher))]

    def build_actor(context):
        return RoleParts(
            FakeBackend(), services, [], on_bound=lambda endpoint: setattr(publisher, "endpoint", endpoint)
        )

    async with fake_role(build_actor):
        yield publisher


def _weights(model, seed=1):
    lm = AutoModelForCausalLM.from_pretrained(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return lm.state_dict()


async def test_from_configure_to_samples(model, data):
    config = rollout_config(model, "rollout.temperature=0.9", "rollout.stop=['q']", data=data)
    async with _rollout() as served:
        with pytest.raises(FailedPrecondition, match="not configured and holds no verified weights"):
            await _generate(served, _prompts(0))
        configured = await _configure(served, config)
        assert configured.version == 0
        facts = configured.facts
        assert (facts["dataset_rows"], facts["validation_rows"], facts["engine"]) == ("5", "0", "hf")
        assert (facts["batch_invariant"], facts["eos_token_ids"], facts["context"]) == ("true", "2", "64")
        answer, block = await _generate(served, _prompts(3, 1))
        assert [str(key) for key in block.rows] == ["1:3:0#0", "1:3:0#1", "1:1:1#0", "1:1:1#1"]
        assert block["ground_truth"].texts() == ["6", "6", "2", "2"]
        assert block["data_source"].texts() == ["sums"] * 4
        assert [json.loads(text) for text in block["prompt_json"].texts()] == [ROWS[i]["prompt"] for i in (3, 3, 1, 1)]
        prompts, responses = block["prompt_ids"].rows(), block["response_ids"].rows()
        assert list(answer.block.tokens) == [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
        for name in ("response_mask", "rollout_logprobs", "versions"):
            assert block[name].lengths.tolist() == [len(ids) for ids in responses]
        assert set(block["finish"].texts()) <= {"stop", "length"}
        assert not any("q" in text or "</s>" in text for text in block["response"].texts())
        assert answer.metrics["response_tokens"] == sum(map(len, responses))
        assert answer.metrics["truncated_share"] == sum(text == "length" for text in block["finish"].texts()) / 4


async def test_three_replicas_give_what_one_gives(model, data):
    config = rollout_config(model, "rollout.slots=3", data=data)
    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(_rollout()) for _ in range(3)]
        for replica in replicas:
            await _configure(replica, config)
        prompts = _prompts(0, 1, 2, 3, 4, 0)
        _, whole = await _generate(replicas[0], prompts)
        names = ["prompt_ids", "response_ids", "rollout_logprobs", "response", "finish"]
        for number, replica in enumerate(replicas):
            _, part = await _generate(replica, prompts[number::3][::-1])
            assert part.select(columns=names).digest() == whole.select(part.rows, names).digest()
        _, later = await _generate(replicas[0], _prompts(0, step=2), step=2)
        assert later["response_ids"].rows()[0].tolist() != whole["response_ids"].rows()[0].tolist()


async def test_greedy_and_validation_rows(model, data, tmp_path):
    (tmp_path / "v.jsonl").write_text(json.dumps({"prompt": "ab"}) + "\n")
    config = rollout_config(model, f"data.validation_path={tmp_path}/v.jsonl", data=data)
    async with _rollout() as served:
        assert (await _configure(served, config)).facts["validation_rows"] == "1"
        _, block = await _generate(served, _prompts(0), greedy=True, validation=True)
        first, second = block["response_ids"].rows()
        assert first.tolist() == second.tolist()
        assert block["prompt_json"].texts() == ['"ab"'] * 2


async def test_rows_that_cannot_be(model, data):
    async with _rollout() as served:
        await _configure(served, rollout_config(model, data=data))
        with pytest.raises(InvalidArgument, match="has no prompt 5: 5 can be used"):
            await _generate(served, _prompts(5))
        with pytest.raises(InvalidArgument, match=r"no validation dataset: set data\.validation_path"):
            await _generate(served, _prompts(0), validation=True)
        with pytest.raises(InvalidArgument, match="twice"):
            await _generate(served, [*_prompts(0), *_prompts(0)])
        with pytest.raises(InvalidArgument, match="empty"):
            await _generate(served, [])


async def test_weights_from_the_actor_and_from_a_peer(model, data):
    config = rollout_config(model, data=data)
    async with _actor() as actor, _rollout() as served, _rollout() as peer:
        for replica in (served, peer):
            await _configure(replica, config)
        _, before = await _generate(served, _prompts(0, 1))
        ref = actor.publish(4, _weights(model), run="r")
        prepared = await _prepare(served, ref)
        assert (prepared.version, prepared.digest) == (4, ref.digest)
        assert (await call(served.role.Describe, role_pb2.DescribeRequest(), timeout=5)).version == 0
        assert (await _commit(served, 4, ref.digest)).version == 4
        assert (await call(served.role.Describe, role_pb2.DescribeRequest(), timeout=5)).version == 4
        _, after = await _generate(served, _prompts(0, 1))
        assert set(after["versions"].data.tolist()) == {4}
        assert after["rollout_logprobs"] != before["rollout_logprobs"]
        # The peer takes them from the first replica; the actor is not asked.
        ref.endpoints[:] = [served.endpoint]
        await _prepare(peer, ref)
        await _commit(peer, 4, ref.digest)
        _, same = await _generate(peer, _prompts(0, 1))
        assert same.digest() == after.digest()
        assert (await _commit(peer, 4, ref.digest)).version == 4


async def test_another_digest_is_refused_and_the_old_version_serves_on(model, data):
    async with _actor() as actor, _rollout() as served:
        await _configure(served, rollout_config(model, data=data))
        _, before = await _generate(served, _prompts(0))
        ref = actor.publish(1, _weights(model), run="r")
        with pytest.raises(FailedPrecondition, match="nothing is prepared; version 0 goes on serving"):
            await _commit(served, 1, ref.digest)
        await _prepare(served, ref)
        for version, digest in ((1, "0" * 32), (2, ref.digest)):
            with pytest.raises(FailedPrecondition, match="version 0 goes on serving"):
                await _commit(served, version, digest)
        _, still = await _generate(served, _prompts(0))
        assert still.digest() == before.digest()
        wrong = weights_pb2.WeightsRef()
        wrong.CopyFrom(ref)
        wrong.digest = "1" * 32
        with pytest.raises(Exception, match="digest"):
            await _prepare(served, wrong)
        wrong.run = "other"
        with pytest.raises(InvalidArgument, match="weights of run 'other'"):
            await _prepare(served, wrong)
        fitting = actor.publish(2, {"model.norm.weight": torch.zeros(3)}, run="r")
        with pytest.raises(FailedPrecondition, match="does not fit"):
            await _prepare(served, fitting)
        with pytest.raises(NotFound):
            await GrpcFetcher(served.connections).fetch(
                weights_pb2.WeightsRef(run="r", version=0, endpoints=[served.endpoint], channel="grpc"), 10
            )
        await _commit(served, 1, ref.digest)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/nowhere/model", "model.path: there is no directory '/nowhere/model'"),
        ("data.path=/nowhere/d.parquet", "does not exist"),
        ("data.prompt_key=promt", r"no column 'promt'; it has prompt, .*did you mean data.prompt_key=prompt"),
        ("data.max_prompt_tokens=3", "row 0 has 6 tokens.* raise data.max_prompt_tokens"),
        ("model.device=cuda:9", "'cuda:9' is not here"),
    ],
)
async def test_configurations_that_cannot_be(model, data, override, message):
    async with _rollout() as served:
        with pytest.raises(FailedPrecondition, match=message):
            await _configure(
                served,
                rollout_config(model, override, data=data)
                if "data.path" not in override
                else rollout_config(model, data=override.removeprefix("data.path=")),
            )
        assert (await _configure(served, rollout_config(model, data=data))).version == 0


async def test_a_released_run_is_gone(model, data):
    async with _rollout() as served:
        await _configure(served, rollout_config(model, data=data))
        await call(served.role.ReleaseRun, role_pb2.ReleaseRunRequest(run="r", epoch=1), timeout=30)
        state = await call(served.role.Describe, role_pb2.DescribeRequest(), timeout=5)
        assert (state.run, state.version) == ("", -1)
        with pytest.raises(FailedPrecondition):
            await _generate(served, _prompts(0))
