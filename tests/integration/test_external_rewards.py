"""The external graders of examples/rewards, run as a user runs them, behind a real reward service and a real Redis."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from shared.batch.block import Block, Ragged, RowKey
from shared.batch.reader import BatchReader
from shared.batch.store import BatchStore, DataServicer
from shared.config import dump_config
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
from shared.rpc.errors import Unavailable
from shared.rpc.interceptors import Guard
from shared.state.embedded import start_redis
from shared.state.registry import list_replicas
from shared.state.store import open_store
from tests.fakes.reward import reward_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/rewards"
TOKEN = "external-rewards"


@contextlib.contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process, killed at the end."""
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def example(command: list[str], **options: Any) -> Iterator[int]:
    """An example server; gives the port that it says it listens on."""
    with running(command, stdout=subprocess.PIPE, **options) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"listening on port (\d+)\n", line)
        assert found, f"{command} said {line!r}"
        yield int(found[1])


@pytest.fixture(scope="module")
def node_directory(tmp_path_factory) -> Path:
    """The Node.js example with its packages, as `npm ci` installs them."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    directory = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(EXAMPLES / "node", directory, ignore=shutil.ignore_patterns("node_modules"))
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(install, cwd=directory, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture
def endpoint(request) -> Iterator[tuple[str, str]]:
    """(backend, endpoint) of an example server."""
    kind = request.param
    if kind == "python":
        with example([sys.executable, str(EXAMPLES / "python_server.py"), "127.0.0.1:0"], cwd=ROOT) as port:
            yield "grpc", f"127.0.0.1:{port}"
    elif kind == "http":
        with example([sys.executable, str(EXAMPLES / "http_server.py"), "0"]) as port:
            yield "http", f"http://127.0.0.1:{port}/score"
    else:
        directory = request.getfixturevalue("node_directory")
        command = ["node", "server.js", "127.0.0.1:0", str(ROOT / "protos")]
        with example(command, cwd=directory) as port:
            yield "grpc", f"127.0.0.1:{port}"


@pytest.fixture
async def service(tmp_path) -> AsyncIterator[str]:
    """`python -m services.reward` with a Redis; gives its endpoint as the registry shows it."""
    redis = start_redis(tmp_path / "redis")
    environment = {**os.environ, "SEXTET_TOKEN": TOKEN, "SEXTET_REDIS_URL": redis.url}
    state = open_store(redis.url)
    command = [sys.executable, "-m", "services.reward", "--metrics-port", "-1", "--data-dir", str(tmp_path)]
    try:
        with running(command, cwd=ROOT, env=environment) as process:
            async with asyncio.timeout(90):
                while not (replicas := await list_replicas(state, "reward")):
                    assert process.poll() is None
                    await asyncio.sleep(0.05)
            yield replicas[0].endpoint
            process.terminate()
            assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        await state.close()
        redis.stop()


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    made = Connections(TOKEN)
    yield made
    await made.close()


@pytest.fixture
async def samples() -> AsyncIterator[batch_pb2.BatchRef]:
    """Three samples, one of which has no ground truth, held by this process."""
    texts = {
        "data_source": ["d"] * 3,
        "prompt_json": ['[{"role": "user", "content": "héllo"}]'] * 3,
        "response": [" 42\n", "41", "é🏳"],
        "ground_truth": ["42", "42", ""],
        "extra_info": ["{}"] * 3,
    }
    rows = tuple(RowKey("1:0:0", index) for index in range(3))
    store = BatchStore(1 << 20)
    server = grpc.aio.server(interceptors=[Guard(TOKEN)])
    batch_pb2_grpc.add_DataServiceServicer_to_server(DataServicer(store), server)
    store.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    block = Block(rows, {name: Ragged.from_text(column) for name, column in texts.items()})
    yield batch_pb2.BatchRef(blocks=[store.put(block, run="run", step=1, tokens=[1, 1, 1])])
    await server.stop(0)


def _operation(name: str, step: int) -> common_pb2.Operation:
    return common_pb2.Operation(id=common_pb2.OperationId(run="run", step=step, name=name), epoch=1)


async def _configure(connections: Connections, service: str, backend: str, endpoint: str) -> None:
    config = dump_config(reward_config(backend=backend, endpoint=endpoint, timeout=5.0))
    request = role_pb2.ConfigureRequest(operation=_operation("reward.configure", 0), config_json=config)
    await call(role_pb2_grpc.RoleServiceStub(connections.channel(service)).Configure, request, timeout=30)


@pytest.mark.parametrize("endpoint", ["python", "node", "http"], indirect=True)
async def test_an_external_grader_grades_a_batch(connections, service, samples, endpoint):
    await _configure(connections, service, *endpoint)
    stub = reward_pb2_grpc.ScoringServiceStub(connections.channel(service))
    request = reward_pb2.ScoreBatchRequest(operation=_operation("reward.score", 1), inputs=samples)
    response = await call(stub.ScoreBatch, request, timeout=30)
    block = await BatchReader(connections).read(batch_pb2.BatchRef(blocks=[response.block]), timeout=10)
    assert block["valid"].scalars().tolist() == [1, 1, 0]
    assert block["score"].scalars()[:2].tolist() == [1.0, 0.0]
    assert block["score/length"].scalars()[:2].tolist() == [4.0, 2.0]
    assert response.metrics["mean"] == 0.5
    assert response.metrics["rejected_errors"] == 1


async def test_an_endpoint_that_is_down_is_named_when_the_run_starts(connections, service):
    with pytest.raises(Unavailable, match=r"reward\.endpoint='127\.0\.0\.1:9' is not available"):
        await _configure(connections, service, "grpc", "127.0.0.1:9")


def test_the_lock_file_names_no_registry():
    text = (EXAMPLES / "node/package-lock.json").read_text()
    assert '"resolved"' not in text
    assert '"integrity"' in text
