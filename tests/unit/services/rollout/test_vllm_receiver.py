"""vLLM's workers as receivers, without an engine: two of them as ranks of one replica, over gloo."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from services.rollout.backend import EngineError
from services.rollout.backends.vllm_start import wanted_names
from services.rollout.weights import Weights, Wire
from shared.gen.sextet.v1 import weights_pb2
from shared.rpc.client import Connections
from shared.rpc.errors import FailedPrecondition, Internal
from shared.weights import part
from shared.weights.digest import raw_bytes, state_digest
from shared.weights.grpc import GrpcFetcher, GrpcPublisher
from shared.weights.join import LocalReceiver, join
from shared.weights.part import WirePart
from tests.contract.test_weights_sync import Actor
from tests.fakes.role import TOKEN, fake_role
from tests.fakes.tiny import write_tiny_llama

pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from services.rollout.backends.vllm import VllmBackend
from services.rollout.backends.vllm_receiver import VllmReceiver
from services.rollout.backends.vllm_transfer import SextetTransfer, used_as_loaded
from services.rollout.backends.vllm_worker import SextetWorker

torch.set_num_threads(1)
_numbers = itertools.count()


class Worker(SextetWorker):
    """A worker whose model keeps what it is given, with what vLLM's worker does with its weight-transfer engine."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self.model_runner = SimpleNamespace(kv_caches=[torch.full((3,), torch.nan)])
        self.loaded: dict[str, torch.Tensor] = {}
        self.weight_transfer_engine = object.__new__(SextetTransfer)
        self.weight_transfer_engine.model = SimpleNamespace(load_weights=self.load)

    def load(self, weights: Any) -> None:
        self.loaded = dict(weights)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.weight_transfer_engine.init_transfer_engine(self.weight_transfer_engine.parse_init_info(init_info))

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.weight_transfer_engine.receive_weights(self.weight_transfer_engine.parse_update_info(update_info))

    def finish_weight_update(self) -> None: ...


@pytest.fixture
def workers():
    made = [Worker(0), Worker(1)]
    yield made
    for worker in made:
        worker.weight_transfer_engine.shutdown()


@pytest.fixture
def model(tmp_path):
    return write_tiny_llama(tmp_path / "model", head_dim=32)


async def take(workers: list[Worker], model: Any, ref: weights_pb2.WeightsRef, **beside: LocalReceiver) -> None:
    """The workers are one replica; those beside are others."""

    async def call(method: str, *args: Any) -> list[Any]:
        return await asyncio.to_thread(lambda: [getattr(worker, method)(*args) for worker in workers])

    receiver = VllmReceiver(call, wanted_names(str(model)), await call("sextet_place"), "127.0.0.1", False)
    gathering = weights_pb2.WeightsGathering(id=f"g{next(_numbers)}", members=["m", *beside])
    connections = Connections(TOKEN)
    try:
        members: dict[str, Any] = {"m": receiver, **beside}
        await asyncio.gather(*(join(connections, ref, gathering, name, each, 30) for name, each in members.items()))
    finally:
        await connections.close()


async def test_every_worker_gets_every_tensor_and_the_group_stays(model, workers):
    actor, groups = Actor(model, "gloo"), set()
    async with fake_role(actor.parts):
        for _ in range(3):
            ref = actor.train(0.1)
            await take(workers, model, ref)
            assert all(worker.loaded == {} or state_digest(worker.loaded) != ref.digest for worker in workers)
            for worker in workers:
                worker.sextet_take("", scrub=True)
                assert state_digest(worker.loaded) == ref.digest
                assert worker.loaded["lm_head.weight"] is worker.loaded["model.embed_tokens.weight"]
                assert not worker.model_runner.kv_caches[0].any()
            groups |= {place["holds"] for worker in workers for place in [worker.sextet_place()]}
    assert len(groups) == 1


async def test_replicas_of_two_workers_and_of_one_process_take_it_together(model, workers):
    actor, other = Actor(model, "gloo"), LocalReceiver(WirePart("127.0.0.1"), torch.device("cpu"))
    try:
        async with fake_role(actor.parts):
            for _ in range(2):
                ref = actor.train(0.1)
                await take(workers, model, ref, n=other)
                for worker in workers:
                    worker.sextet_take("", scrub=False)
                    assert state_digest(worker.loaded) == ref.digest
                assert state_digest(other.tensors) == ref.digest
            assert other.holds == workers[0].sextet_place()["holds"] != ""
    finally:
        other._part.close()


async def test_another_architecture_is_refused_and_what_fails_is_told(model, workers, monkeypatch):
    actor = Actor(model, "gloo")
    async with fake_role(actor.parts):
        monkeypatch.setenv("SEXTET_FAILPOINTS", "weights.bucket.0=error")
        with pytest.raises(FailedPrecondition, match="FailpointError"):
            await take(workers, model, actor.train(0.1))
        monkeypatch.setenv("SEXTET_FAILPOINTS", "")
        monkeypatch.setattr("shared.weights.group.MEET_SECONDS", 0.3)
        other = AutoModelForCausalLM.from_pretrained(model)
        other.model.norm.register_buffer("more", torch.ones(3))
        actor.lm = other
        with pytest.raises(EngineError, match=r"no tensor 'model\.norm\.more'"):
            await take(workers, model, actor.train(0.1))


@pytest.mark.parametrize(
    ("damaged", "why"), [((1, 2), "has digest"), ((2,), "two ranks hold .* and differ")], ids=["both", "one"]
)
async def test_a_version_that_was_prepared_is_gone_once_another_is_on_its_way(
    model, workers, monkeypatch, damaged, why
):
    """The workers hold what came last. A damaged version 2 was served as version 1, which had been prepared before."""

    async def collective_rpc(method: str, args: Any = ()) -> list[Any]:
        return await asyncio.to_thread(lambda: [getattr(worker, method)(*args) for worker in workers])

    engine, actor, connections = VllmBackend(), Actor(model, "gloo"), Connections(TOKEN)
    one = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    engine._engine = SimpleNamespace(collective_rpc=collective_rpc, vllm_config=one)
    engine._shape = wanted_names(str(model))
    weights = Weights(GrpcFetcher(connections), GrpcPublisher(), 30, Wire(connections, "m", 30))
    weights.start("r")

    def spoiled(schedule: Any, group: Any, local: Any, deadline: float, run: Any = part.run) -> None:
        run(schedule, group, local, deadline)
        if group.rank in damaged:
            raw_bytes(local["model.norm.weight"])[0] ^= 1

    async def prepare() -> weights_pb2.WeightsRef:
        ref = actor.train(0.1)
        await weights.prepare(ref, engine, weights_pb2.WeightsGathering(id=f"p{next(_numbers)}", members=["m"]))
        return ref

    async with fake_role(actor.parts):
        first = await prepare()
        monkeypatch.setattr(part, "run", spoiled)
        with pytest.raises(Internal, match=rf"tensor 'model\.norm\.weight'.* {why}"):
            await prepare()
        with pytest.raises(FailedPrecondition, match="weight version 1 is not prepared here"):
            await weights.commit(first.version, first.digest, engine)
    assert (weights.version, [worker.loaded for worker in workers]) == (0, [{}, {}])
    weights.stop()
    await connections.close()


class Worker023(Worker):
    """As vLLM 0.23's: it begins its own reload unless it is told not to."""

    reloads: bool | None = None

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        self.reloads = is_checkpoint_format


@pytest.mark.parametrize("in_place", [True, False])
def test_vllm_0_23_reloads_unless_weights_go_straight_into_place(in_place, tmp_path):
    worker = Worker023(0)
    worker.weight_transfer_engine.__dict__["in_place"] = in_place
    save_file({"w": torch.ones(2)}, tmp_path / "1.safetensors")
    worker.sextet_take(str(tmp_path / "1.safetensors"), scrub=False)
    assert worker.reloads is not in_place
    assert worker.loaded["w"].tolist() == [1, 1]


def layer(kind: type, **attributes: Any) -> torch.nn.Module:
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class Repacking(UnquantizedLinearMethod):
    """As quantization's are: another method of the same kind."""


def test_only_known_layers_are_used_as_loaded():
    linear = layer(torch.nn.Module, quant_method=UnquantizedLinearMethod())
    known = torch.nn.Sequential(linear, layer(Attention), torch.nn.LayerNorm(3), layer(torch.nn.Module))
    assert used_as_loaded(known)
    for other in (
        layer(torch.nn.Module, quant_method=Repacking()),
        layer(MLAAttention),
        layer(torch.nn.Module, process_weights_after_loading=lambda dtype: None),
    ):
        assert not used_as_loaded(torch.nn.Sequential(known, other))
    on_a_cpu = Worker(0).weight_transfer_engine
    on_a_cpu.model = known
    assert not on_a_cpu.in_place


@pytest.mark.parametrize(("engines", "channels"), [(1, ["gloo"]), (2, [])])
async def test_of_several_data_parallel_engines_none_is_on_a_wire(model, engines, channels):
    async def collective_rpc(method: str, args: Any = ()) -> list[Any]:
        return [{"type": "cpu", "host": "h", "device": "cpu", "sees": [], "holds": "", "has": {}}]

    backend, shape = VllmBackend(), SimpleNamespace(data_parallel_size=engines)
    backend._engine = SimpleNamespace(
        collective_rpc=collective_rpc, vllm_config=SimpleNamespace(parallel_config=shape), shutdown=lambda: None
    )
    receiver = await backend.receiver(WirePart("127.0.0.1"), None)
    assert receiver.channels == channels
