"""The reward service as the controller sees it: real servers, batches by reference, operations, bad graders."""

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from pydantic import SecretStr

from services.reward.__main__ import build
from services.reward.settings import RewardSettings
from shared.batch import refs
from shared.batch.block import Block, Ragged, RowKey
from shared.batch.reader import BatchReader
from shared.batch.store import BatchStore, DataServicer
from shared.config import RunConfig, dump_config
from shared.gen.sextet.v1 import (
    batch_pb2,
    batch_pb2_grpc,
    common_pb2,
    reward_pb2,
    reward_pb2_grpc,
    role_pb2,
    role_pb2_grpc,
)
from shared.rpc.client import Connections, call
from shared.rpc.errors import (
    BatchLost,
    FailedPrecondition,
    InvalidArgument,
    PayloadMismatch,
    SextetError,
    StaleEpoch,
    Unimplemented,
)
from shared.rpc.interceptors import Guard
from shared.rpc.options import SERVER_OPTIONS
from shared.rpc.run import serve_role
from tests.fakes.process import alive_with
from tests.fakes.reward import function_config

TOKEN = "secret"


@dataclass
class Service:
    """A reward service, and a process that holds samples."""

    samples: BatchStore
    connections: Connections
    endpoint: str

    def reference(self, responses: list[str], uid: str = "1:0:0", step: int = 1) -> batch_pb2.BatchRef:
        texts = {"data_source": "d", "prompt_json": '"p"', "ground_truth": "a", "extra_info": "{}"}
        columns = {name: Ragged.from_text([text] * len(responses)) for name, text in texts.items()}
        columns["response"] = Ragged.from_text(responses)
        block = Block(tuple(RowKey(uid, index) for index in range(len(responses))), columns)
        ref = self.samples.put(block, run="run", step=step, tokens=[10 + index for index in range(len(responses))])
        return batch_pb2.BatchRef(blocks=[ref])

    async def configure(self, config: RunConfig, run: str = "run", epoch: int = 1, part: str = "") -> Any:
        request = role_pb2.ConfigureRequest(
            operation=_operation("reward.configure", run=run, step=0, epoch=epoch, part=part),
            config_json=dump_config(config),
        )
        return await call(self.role.Configure, request, timeout=20)

    async def score(self, inputs: batch_pb2.BatchRef, **operation: Any) -> Any:
        request = reward_pb2.ScoreBatchRequest(operation=_operation("reward.score", **operation), inputs=inputs)
        stub = reward_pb2_grpc.ScoringServiceStub(self.connections.channel(self.endpoint))
        return await call(stub.ScoreBatch, request, timeout=20)

    @property
    def role(self) -> role_pb2_grpc.RoleServiceStub:
        return role_pb2_grpc.RoleServiceStub(self.connections.channel(self.endpoint))

    async def read(self, ref: batch_pb2.BlockRef) -> Block:
        return await BatchReader(self.connections).read(batch_pb2.BatchRef(blocks=[ref]), timeout=10)


def _operation(name: str, *, run: str = "run", step: int = 1, epoch: int = 1, part: str = "") -> common_pb2.Operation:
    return common_pb2.Operation(id=common_pb2.OperationId(run=run, step=step, name=name, part=part), epoch=epoch)


@contextlib.asynccontextmanager
async def holder(connections: Connections) -> AsyncIterator[BatchStore]:
    store = BatchStore(1 << 30)
    server = grpc.aio.server(interceptors=[Guard(TOKEN)], options=SERVER_OPTIONS)
    batch_pb2_grpc.add_DataServiceServicer_to_server(DataServicer(store), server)
    store.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield store
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def reward_service(**changes: Any) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Task[Any]]]:
    """The service in this process: its endpoint, what stops it, and its end."""
    settings = RewardSettings(token=SecretStr(TOKEN), redis_url="memory://", metrics_port=-1, **changes)
    started, stop, built = asyncio.Event(), asyncio.Event(), []

    def remember(context: Any) -> Any:
        built.append(context)
        return build(context)

    task = asyncio.create_task(serve_role(settings, remember, started=started, stop=stop))
    async with asyncio.timeout(60):
        await started.wait()
    try:
        yield built[0].store.endpoint, stop, task
    finally:
        stop.set()
        await task


@pytest.fixture
async def service(tmp_path) -> AsyncIterator[Service]:
    connections = Connections(TOKEN)
    async with reward_service(data_dir=tmp_path) as (endpoint, _, task), holder(connections) as samples:
        made = Service(samples, connections, endpoint)
        yield made
        described = await call(made.role.Describe, role_pb2.DescribeRequest(), timeout=5)
        release = role_pb2.ReleaseRunRequest(run=described.run or "run", epoch=described.epoch)
        await call(made.role.ReleaseRun, release, timeout=5)
    await connections.close()
    assert task.result()[0] == 0


async def test_scores_come_back_by_row_key_with_metrics(service):
    configured = await service.configure(function_config("contract", workers=2))
    assert (configured.version, configured.facts["signature"]) == (0, "verl")
    inputs = refs.merge(service.reference(["a", "b"]), service.reference(["bad", "a"], uid="1:1:0"))
    response = await service.score(refs.select_rows(inputs, list(reversed(refs.row_keys(inputs)))))
    block = await service.read(response.block)
    scores = dict(zip(block.rows, block["score"].scalars().tolist(), strict=True))
    valid = dict(zip(block.rows, block["valid"].scalars().tolist(), strict=True))
    assert scores[RowKey("1:0:0", 0)] == scores[RowKey("1:1:0", 1)] == 1.0
    assert scores[RowKey("1:0:0", 1)] == 0.0
    assert math.isnan(scores[RowKey("1:1:0", 0)])
    assert [key for key, flag in valid.items() if not flag] == [RowKey("1:1:0", 0)]
    assert block["score/length"].scalars().tolist() == pytest.approx(
        [math.nan if math.isnan(scores[key]) else 1.0 for key in block.rows], nan_ok=True
    )
    assert list(response.scores) == pytest.approx([scores[key] for key in block.rows], nan_ok=True)
    assert refs.row_tokens(response.block) == refs.row_tokens(inputs)
    assert response.metrics["mean"] == pytest.approx(2 / 3)
    assert (response.metrics["invalid"], response.metrics["raised_errors"]) == (1, 1)


async def test_the_same_operation_grades_once(service):
    await service.configure(function_config("process_id"))
    inputs = service.reference(["a"])
    first, again = await asyncio.gather(service.score(inputs), service.score(inputs))
    assert first == again == await service.score(inputs)
    assert (await service.score(inputs, part="2")).block.block != first.block.block
    with pytest.raises(PayloadMismatch):
        await service.score(service.reference(["b"]))
    await service.score(inputs, part="3", epoch=2)
    with pytest.raises(StaleEpoch):
        await service.score(inputs, part="4", epoch=1)


async def test_a_grader_that_grades_nothing_fails_the_call_and_the_next_try_may_do_better(service):
    await service.configure(function_config("flaky"))
    with pytest.raises(
        FailedPrecondition, match=r"reward\.function=.*flaky' graded none of 2 responses: ValueError: bad 1"
    ):
        await service.score(service.reference(["bad 1", "bad 2"]))
    response = await service.score(service.reference(["bad 1", "fine"]), part="2")
    assert (response.metrics["count"], response.metrics["invalid"]) == (1, 1)


async def test_an_unusable_function_is_one_clear_message_and_the_service_stays_usable(service):
    with pytest.raises(FailedPrecondition, match=r"reward\.function=.*has no function 'ecko'; near names: echo"):
        await service.configure(function_config("ecko"))
    with pytest.raises(FailedPrecondition, match="configured for run"):
        await service.score(service.reference(["a"]))
    await service.configure(function_config("echo"), part="again")
    assert (await service.score(service.reference(["a"]))).metrics["mean"] == 1.0


async def test_runs_do_not_mix(service):
    await service.configure(function_config("echo"))
    with pytest.raises(FailedPrecondition, match="configured for run 'run', not 'other'"):
        await service.score(service.reference(["a"]), run="other")
    await service.configure(function_config("asynchronous"), run="other", epoch=2)
    with pytest.raises(FailedPrecondition, match="run"):
        await service.score(service.reference(["a"]), epoch=2, part="2")


async def test_describe_release_and_no_checkpoint(service):
    assert (await call(service.role.Describe, role_pb2.DescribeRequest(), timeout=5)).version == -1
    await service.configure(function_config("echo"))
    scored = await service.score(service.reference(["a"]))
    described = await call(service.role.Describe, role_pb2.DescribeRequest(), timeout=5)
    assert (described.role, described.run, described.version, described.fault) == ("reward", "run", 0, "")
    assert described.held_bytes > 0
    await call(service.role.ReleaseStep, role_pb2.ReleaseStepRequest(run="run", epoch=1, step=1), timeout=5)
    with pytest.raises(BatchLost):
        await service.read(scored.block)
    request = role_pb2.StageCheckpointRequest(operation=_operation("reward.stage", step=2))
    with pytest.raises(Unimplemented):
        await call(service.role.StageCheckpoint, request, timeout=5)
    await call(service.role.ReleaseRun, role_pb2.ReleaseRunRequest(run="run", epoch=1), timeout=5)
    assert (await call(service.role.Describe, role_pb2.DescribeRequest(), timeout=5)).version == -1


async def test_missing_columns_and_lost_blocks_are_named(service):
    await service.configure(function_config("echo"))
    block = Block((RowKey("u", 0),), {"response": Ragged.from_text(["a"])})
    bare = service.samples.put(block, run="run", step=1, tokens=[1])
    with pytest.raises(InvalidArgument, match="no column 'data_source'; it has response"):
        await service.score(batch_pb2.BatchRef(blocks=[bare]))
    lost = service.reference(["a"])
    service.samples.release("run", None)
    with pytest.raises(BatchLost):
        await service.score(lost, part="2")


async def test_a_hanging_grader_does_not_outlive_the_service(tmp_path, monkeypatch):
    mark = secrets.token_hex(8)
    monkeypatch.setenv("TEST_MARK", mark)
    connections = Connections(TOKEN)
    served = reward_service(data_dir=tmp_path, drain_timeout=0.5)
    async with served as (endpoint, stop, task), holder(connections) as samples:
        service = Service(samples, connections, endpoint)
        await service.configure(function_config("misbehave", timeout=300.0))
        attempt = asyncio.create_task(service.score(service.reference(["orphan_hang"])))
        async with asyncio.timeout(60):
            while "sleep 977" not in alive_with("TEST_MARK", mark):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        stop.set()
        async with asyncio.timeout(30):
            assert (await task)[0] == 0
        with pytest.raises(SextetError):
            await attempt
    await connections.close()
    async with asyncio.timeout(30):
        while alive_with("TEST_MARK", mark):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
