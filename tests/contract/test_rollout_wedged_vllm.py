"""vLLM's engine process is stopped (SIGSTOP) with rows in progress, and over new weights: found, killed, replaced."""

import asyncio
import json
import signal
import time

import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
from services.rollout.__main__ import build
from services.rollout.settings import RolloutSettings
from shared.config import dump_config
from shared.gen.sextet.v1 import common_pb2, role_pb2, rollout_pb2, rollout_pb2_grpc
from shared.rpc.client import call
from shared.rpc.errors import FailedPrecondition
from shared.state import open_store
from shared.state.registry import list_replicas
from tests.contract.test_rollout_service import _actor, _commit, _prepare, _weights
from tests.fakes.role import fake_role
from tests.fakes.rollout import rollout_config
from tests.fakes.tiny import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(300)]


def _operation(name, step=1, part="0"):
    return common_pb2.Operation(id=common_pb2.OperationId(run="r", step=step, name=name, part=part), epoch=1)


def _generate(part="0"):
    # Rows of their own: finished ones are not drawn again.
    prompts = [rollout_pb2.PromptRow(uid=f"1:{part}:{k}", index=0, samples=range(4)) for k in range(8)]
    return rollout_pb2.GenerateRequest(operation=_operation("generate", part=part), prompts=prompts)


def _engine():
    """Its processes."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "tracker" not in " ".join(process.cmdline())]


async def _replaced(store, engine):
    async with asyncio.timeout(30):
        while (await list_replicas(open_store(store), "rollout"))[0].state != "restarting":  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    # Killed; on a busy machine it takes a moment until they are gone.
    async with asyncio.timeout(30):
        while [p for p in engine if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_process_that_is_stopped_over_new_weights(tmp_path):
    """Long before what vLLM itself is given for a load: the commit ends, and another engine takes its place."""
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "data_source": "s"}) + "\n")
    model = write_tiny_llama(tmp_path / "m", head_dim=32)
    config = rollout_config(model, "rollout.engine=vllm", "rollout.max_tokens=20", data=str(data))
    configure = role_pb2.ConfigureRequest(operation=_operation("configure", 0), config_json=dump_config(config))
    options = {"redis_url": "memory://wedged-commit", "threads": 1, "probe_deadline": 4.0}
    async with _actor() as actor, fake_role(build, RolloutSettings, **options) as served:
        await call(served.role.Configure, configure, timeout=120)
        ref = actor.publish(1, _weights(model), run="r")
        await _prepare(served, ref)
        engine = _engine()
        for process in engine:
            process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        with pytest.raises(FailedPrecondition, match=r"stood still for .* s over new weights|has made no token"):
            await _commit(served, 1, ref.digest)
        assert time.monotonic() - stopped < 30
        await _replaced("memory://wedged-commit", engine)
        await call(served.role.Configure, configure, timeout=120)
        await _prepare(served, ref)
        assert (await _commit(served, 1, ref.digest)).version == 1


async def test_a_stopped_engine_process(tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "data_source": "s"}) + "\n")
    config = rollout_config(
        write_tiny_llama(tmp_path / "m", head_dim=32), "rollout.engine=vllm", "rollout.max_tokens=90", data=str(data)
    )
    configure = role_pb2.ConfigureRequest(operation=_operation("configure", 0), config_json=dump_config(config))
    async with fake_role(build, RolloutSettings, redis_url="memory://wedged", threads=1) as served:
        await call(served.role.Configure, configure, timeout=120)
        stub = rollout_pb2_grpc.RolloutServiceStub(served.channel)
        wanted = (await call(stub.Generate, _generate(), timeout=60)).block.digest
        engine = _engine()
        pending = asyncio.create_task(call(stub.Generate, _generate("1"), timeout=60))
        await asyncio.sleep(0.05)
        for process in engine:
            process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        with pytest.raises(FailedPrecondition, match="the engine is dead: the engine has made no token"):
            await pending
        assert 3 < time.monotonic() - stopped < 11
        await _replaced("memory://wedged", engine)
        await call(served.role.Configure, configure, timeout=120)
        assert (await call(stub.Generate, _generate(), timeout=60)).block.digest == wanted
