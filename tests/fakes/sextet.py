"""The five roles in this event loop: real operations, stores, readers and registrations; arithmetic instead of models.

A model is a hash: `update` folds the batch into it, `generate` draws tokens from it. So two runs that end with the same
hash have applied the same updates, each once, in the same order.
"""

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from shared.batch.block import Block, Ragged, RowKey
from shared.batch.reader import BatchReader
from shared.batch.store import BatchStore, DataServicer
from shared.config import RunConfig
from shared.gen.sextet.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    batch_pb2_grpc,
    common_pb2,
    critic_pb2,
    critic_pb2_grpc,
    reference_pb2,
    reference_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    role_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    weights_pb2,
)
from shared.places import place
from shared.rpc.client import Connections
from shared.rpc.errors import DamagedCheckpoint, FailedPrecondition, InvalidArgument, Unimplemented, VersionGap
from shared.rpc.interceptors import Guard
from shared.rpc.operations import Operations
from shared.rpc.options import SERVER_OPTIONS
from shared.rpc.role import ENGINE, Configured, RoleServicer, SavedCheckpoint
from shared.rpc.settings import ServiceSettings
from shared.seeds import derive_seed
from shared.state import StateStore
from shared.state.registry import Registration
from tests.fakes.ports import kept_port

TOKEN = "token-of-the-tests-0123456789"
LEASE = 0.9
DATASET_ROWS = 10
Hook = Callable[[Any], Awaitable[None]]


def fold(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@dataclass(frozen=True)
class FakeCopy:
    """A role's state as it was."""

    role: "FakeRole"
    model: str
    version: int

    async def save(self, directory: str) -> SavedCheckpoint:
        await self.role._at("checkpoint", None)
        state = json.dumps({"model": self.model, "version": self.version})
        await asyncio.to_thread((place(directory) / "state.json").write, state.encode())
        return SavedCheckpoint(fold(self.model), 1, self.version)


class FakeRole:
    """One replica of one role.

    Attributes:
        hooks: awaited in the middle of an operation of that name; may raise, wait, or kill the replica.
        done: operations done, by name.
        rows: how often each row was made, by operation name.
        offers: channels by which an actor's weights can be taken together.
    """

    def __init__(self, store: StateStore, role: str, replica: str) -> None:
        self.role, self.replica = role, replica
        self.hooks: dict[str, Hook] = {}
        self.done: Counter[str] = Counter()
        self.rows: dict[str, Counter[RowKey]] = defaultdict(Counter)
        self.refuse_configure = self.now_fault = self.profile_fault = ""
        self.response_tokens, self.same_length, self.long_tail = 4, False, False
        self.token_seconds = 0.0
        self.ages_seen: list[int] = []
        self.facts: dict[str, str] = {}
        self.offers: tuple[str, ...] = ()
        self._state = store
        self._kept = contextlib.ExitStack()
        self._port = self._kept.enter_context(kept_port())

    async def start(self) -> "FakeRole":
        """Starts, or starts again on the same port as a new process would."""
        self.model, self.now_version, self.staged, self.published = "", -1, {}, {}
        self.incarnation = secrets.token_hex(4)
        self.operations, self.store = Operations(), BatchStore(1 << 26)
        self.connections = Connections(TOKEN)
        self.reader = BatchReader(self.connections, self.store, unreachable_after=0.5)
        settings = ServiceSettings.model_validate({"role": self.role, "replica": self.replica, "token": TOKEN})
        servicer = FakeRoleServicer(settings, self.operations, self.store, self, self.incarnation)
        servicer.fake, self.servicer = self, servicer
        self.server = grpc.aio.server(interceptors=[Guard(TOKEN)], options=SERVER_OPTIONS)
        role_pb2_grpc.add_RoleServiceServicer_to_server(servicer, self.server)
        batch_pb2_grpc.add_DataServiceServicer_to_server(DataServicer(self.store), self.server)
        for add in SERVICES[self.role]:
            add(self, self.server)
        self.server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self.server.start()
        self.endpoint = self.store.endpoint = f"127.0.0.1:{self._port}"
        self.registration = Registration(
            self._state, self.role, self.replica, self.endpoint, self.incarnation, servicer.state, LEASE, {}
        )
        await self.registration.start()
        self.alive = True
        return self

    async def kill(self) -> None:
        """As kill -9: no goodbye; the lease runs out by itself."""
        if not self.alive:
            return
        self.alive = False
        assert self.registration._task
        self.registration._task.cancel()
        for entry in self.operations._entries.values():
            if entry.task and entry.task is not asyncio.current_task():
                entry.task.cancel()
        await self.server.stop(0)
        await self.connections.close()

    async def stop(self) -> None:
        """As after SIGTERM."""
        if self.alive:
            await self.registration.stop()
            await self.kill()

    def give_port_back(self) -> None:
        self._kept.close()

    # What every backend has.

    async def configure(self, config: RunConfig, run: str, checkpoint: str | None) -> Configured:
        await self._at("configure", None)
        if self.refuse_configure:
            raise InvalidArgument(self.refuse_configure)
        self.config, self.run = config, run
        self.model, self.now_version = fold(self.role, config.seed), 0
        if checkpoint:
            try:
                saved = json.loads(await asyncio.to_thread((place(checkpoint) / "state.json").read))
            except ValueError as error:
                raise DamagedCheckpoint(f"{checkpoint} is damaged: {error}") from None
            self.model, self.now_version = saved["model"], saved["version"]
        self.done["configure"] += 1
        facts = {"dataset_rows": str(DATASET_ROWS), **self.facts} if self.role == "rollout" else {}
        return Configured(self.now_version, facts)

    async def stage(self) -> "FakeCopy":
        if self.role not in ("actor", "critic"):
            raise Unimplemented(f"{self.role} has no state")
        await self._at("stage", None)
        return FakeCopy(self, self.model, self.now_version)

    async def release(self, run: str) -> None:
        self.model, self.now_version = "", -1

    def version(self) -> int:
        return self.now_version

    def fault(self) -> str:
        return self.now_fault

    # Rollout.

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Any) -> rollout_pb2.GenerateResponse:
        async def work() -> rollout_pb2.GenerateResponse:
            if self.now_version < 0:
                raise FailedPrecondition("no weights")
            keys = [(RowKey(prompt.uid, sample), prompt) for prompt in request.prompts for sample in prompt.samples]
            before = await self._earlier(request)
            rows = [self._row(key, prompt, request, before.get(key)) for key, prompt in keys]
            ids, versions = [row[0] for row in rows], [row[1] for row in rows]
            columns = {"response_ids": Ragged.from_rows(ids, "int32"), "versions": Ragged.from_rows(versions, "int32")}
            return rollout_pb2.GenerateResponse(
                block=self._put(request, [key for key, _ in keys], columns, [len(row) for row in ids]),
                metrics=self._generated([*map(len, ids)]),
                oldest=[int(min(row, default=self.now_version)) for row in versions],
                cut=[place for place, row in enumerate(rows) if row[2]],
            )

        return await self._operate(request, "generate", work)

    def _generated(self, lengths: list[int]) -> dict[str, float]:
        seconds = {"seconds": self.token_seconds * sum(lengths)} if self.token_seconds else {}
        return {"response_tokens": float(sum(lengths)), "length_mean": float(np.mean(lengths)), **seconds}

    async def _earlier(self, request: rollout_pb2.GenerateRequest) -> dict[RowKey, tuple[np.ndarray, np.ndarray]]:
        if not request.earlier.blocks:
            return {}
        block = await self.reader.read(request.earlier, ["response_ids", "versions"], timeout=5)
        columns = block.columns["response_ids"].rows(), block.columns["versions"].rows()
        return dict(zip(block.rows, zip(*columns, strict=True), strict=True))

    def _row(self, key: RowKey, prompt: Any, request: Any, before: Any) -> tuple[np.ndarray, np.ndarray, bool]:
        """Its tokens, their versions, and whether the budget cut it."""
        ids, versions = before or (np.array([], int), np.array([], int))
        whole = self._tokens(key, prompt.step or request.operation.id.step, request.greedy)
        end = min(len(whole), len(ids) + (request.budget or len(whole)))
        new = whole[len(ids) : end]
        return np.append(ids, new), np.append(versions, np.full(len(new), self.now_version)), end < len(whole)

    def _tokens(self, key: RowKey, step: int, greedy: bool) -> np.ndarray:
        purpose = f"{self.model}:{'greedy' if greedy else 'sample'}"
        seed = derive_seed(self.config.seed, step, key.uid, key.sample, purpose)
        length = self.response_tokens + (0 if self.same_length else key.sample % 3)
        if self.long_tail:
            length = 1 + derive_seed(0, 0, key.uid, key.sample, "length") % 12
        return np.random.default_rng(seed).integers(0, 1000, length)

    async def PrepareWeights(self, request: Any, context: Any) -> rollout_pb2.PrepareWeightsResponse:
        async def work() -> rollout_pb2.PrepareWeightsResponse:
            self.staged[request.weights.version] = request.weights.digest
            return rollout_pb2.PrepareWeightsResponse(version=request.weights.version, digest=request.weights.digest)

        return await self._operate(request, "prepare_weights", work)

    async def CommitWeights(self, request: Any, context: Any) -> rollout_pb2.CommitWeightsResponse:
        async def work() -> rollout_pb2.CommitWeightsResponse:
            if self.staged.get(request.version) != request.digest:
                raise FailedPrecondition(f"version {request.version} was not prepared")
            self.model, self.now_version = request.digest, request.version
            return rollout_pb2.CommitWeightsResponse(version=request.version)

        return await self._operate(request, "commit_weights", work)

    # Reward, reference, critic and actor: columns from rows.

    async def ScoreBatch(self, request: Any, context: Any) -> reward_pb2.ScoreBatchResponse:
        async def work() -> reward_pb2.ScoreBatchResponse:
            block = await self._read(request, ["response_ids"])
            scores = [float(row.sum() % 2) for row in block.columns["response_ids"].rows()]
            columns = {"score": Ragged.from_scalars(np.array(scores), "float32")}
            ref = self._put(request, block.rows, columns, [1] * len(scores))
            return reward_pb2.ScoreBatchResponse(block=ref, metrics={"mean": float(np.mean(scores))}, scores=scores)

        return await self._operate(request, "score", work)

    async def ComputeValues(self, request: Any, context: Any) -> critic_pb2.ComputeValuesResponse:
        block = await self._column(request, "values", "values")
        return critic_pb2.ComputeValuesResponse(block=block)

    async def ComputeLogprobs(self, request: Any, context: Any) -> Any:
        if self.role == "reference":
            block = await self._column(request, "logprobs", "ref_logprobs")
            return reference_pb2.ReferenceServiceComputeLogprobsResponse(block=block)
        block = await self._column(request, "logprobs", "old_logprobs")
        return actor_pb2.ActorServiceComputeLogprobsResponse(block=block)

    async def _column(self, request: Any, operation: str, column: str) -> Any:
        async def work() -> Any:
            block = await self._read(request, ["response_ids"])
            columns = {
                column: Ragged.from_rows([row / 1000 for row in block.columns["response_ids"].rows()], "float32")
            }
            ref = self._put(request, block.rows, columns, [1] * len(block.rows))
            return actor_pb2.ActorServiceComputeLogprobsResponse(block=ref)

        return (await self._operate(request, operation, work, ENGINE)).block

    async def ComputeAdvantages(self, request: Any, context: Any) -> actor_pb2.ComputeAdvantagesResponse:
        async def work() -> actor_pb2.ComputeAdvantagesResponse:
            block = await self._read(request, None)
            order = sorted(range(len(block.rows)), key=lambda index: block.rows[index])
            self.columns_seen = sorted(block.columns)
            oldest = [int(row.min()) for row in block.columns["versions"].rows() if len(row)]
            self.ages_seen.append(self.now_version - min(oldest, default=self.now_version))
            block = block.select([block.rows[index] for index in order], ["response_ids", "score"])
            return actor_pb2.ComputeAdvantagesResponse(
                block=self._put(request, block.rows, block.columns, [1] * len(block.rows)), metrics={"kl": 0.5}
            )

        return await self._operate(request, "advantages", work, ENGINE)

    async def Update(self, request: Any, context: Any) -> Any:
        async def work() -> Any:
            if request.base_version != self.now_version:
                raise VersionGap(f"for version {request.base_version}, and this is {self.now_version}")
            block = await self._read(request, None)
            for key in block.rows:
                self.rows["update"][key] += 1
            self.model = fold(self.model, block.digest())
            self.now_version += 1
            await self._at("applied", request)
            return actor_pb2.ActorServiceUpdateResponse(
                version=self.now_version, metrics={"loss": 0.25}, profile=self._seen(request)
            )

        answer = await self._operate(request, "update", work, ENGINE, mutates=True)
        if self.role == "actor":
            return answer
        return critic_pb2.CriticServiceUpdateResponse(
            version=answer.version, metrics=answer.metrics, profile=answer.profile
        )

    def _seen(self, request: Any) -> list[common_pb2.RankProfile]:
        """By two ranks, the second of which waits for the first; with a `profile_fault` by neither."""
        if not request.HasField("profile"):
            return []
        if self.profile_fault:
            return [common_pb2.RankProfile(rank=rank, seconds=2.0, fault=self.profile_fault) for rank in (0, 1)]
        shares = [(0.1, 0.8), (0.6, 0.3)]
        return [
            common_pb2.RankProfile(
                rank=rank, path=f"{request.profile.prefix}-rank-{rank}.json.gz", seconds=2.0 + rank,
                communication_share=communication, compute_share=compute, memory_peak_gib=1.5,
                top=[common_pb2.OperatorTime(name="aten::mm", seconds=1.0, calls=7)],
            )
            for rank, (communication, compute) in enumerate(shares)
        ]  # fmt: skip

    async def HoldRows(self, request: Any, context: Any) -> actor_pb2.HoldRowsResponse:
        async def work() -> actor_pb2.HoldRowsResponse:
            block = await self._read(request, None)
            tokens = [len(row) for row in block.columns["response_ids"].rows()]
            return actor_pb2.HoldRowsResponse(block=self._put(request, block.rows, block.columns, tokens))

        return await self._operate(request, "hold", work)

    async def PublishWeights(self, request: Any, context: Any) -> actor_pb2.PublishWeightsResponse:
        async def work() -> actor_pb2.PublishWeightsResponse:
            weights = weights_pb2.WeightsRef(
                run=self.run, version=self.now_version, endpoints=[self.endpoint], digest=self.model, bytes=1,
                offers=self.offers,
            )  # fmt: skip
            return actor_pb2.PublishWeightsResponse(weights=weights)

        return await self._operate(request, "publish_weights", work, ENGINE)

    async def ExportModel(self, request: Any, context: Any) -> actor_pb2.ExportModelResponse:
        async def work() -> actor_pb2.ExportModelResponse:
            write(Path(request.directory) / "model.json", self.model)
            return actor_pb2.ExportModelResponse(directory=request.directory)

        return await self._operate(request, "export", work, ENGINE)

    async def _operate(
        self,
        request: Any,
        name: str,
        work: Callable[[], Awaitable[Any]],
        lane: str | None = None,
        mutates: bool = False,
    ) -> Any:
        async def counted() -> Any:
            await self._at(name, request)
            answer = await work()
            self.done[name] += 1
            await self._at(f"after {name}", request)
            return answer

        return await self.operations.run(request, counted, lane=lane, mutates=mutates)

    async def _at(self, name: str, request: Any) -> None:
        if hook := self.hooks.get(name):
            await hook(request)

    async def _read(self, request: Any, columns: list[str] | None) -> Block:
        return await self.reader.read(request.inputs, columns, timeout=5)

    def _put(self, request: Any, keys: Any, columns: dict[str, Ragged], tokens: list[int]) -> Any:
        operation = request.operation.id
        for key in keys:
            self.rows[operation.name][key] += 1
        return self.store.put(Block(tuple(keys), columns), run=operation.run, step=operation.step, tokens=tokens)


class FakeRoleServicer(RoleServicer):
    """Whose Describe can be made to hang."""

    fake: FakeRole

    async def Describe(self, request: Any, context: Any) -> Any:
        await self.fake._at("describe", request)
        return await super().Describe(request, context)


SERVICES: dict[str, list[Any]] = {
    "rollout": [rollout_pb2_grpc.add_RolloutServiceServicer_to_server],
    "reward": [reward_pb2_grpc.add_ScoringServiceServicer_to_server],
    "reference": [reference_pb2_grpc.add_ReferenceServiceServicer_to_server],
    "critic": [critic_pb2_grpc.add_CriticServiceServicer_to_server],
    "actor": [actor_pb2_grpc.add_ActorServiceServicer_to_server],
}


class FakeSextet:
    """Replicas by name, started on demand, all stopped at the end."""

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self.replicas: dict[str, FakeRole] = {}

    async def start(self, *names: str) -> list[FakeRole]:
        """Starts replicas, "actor-0" and so on."""
        started = []
        for name in names:
            self.replicas[name] = FakeRole(self.store, name.rpartition("-")[0], name)
            started.append(await self.replicas[name].start())
        return started

    def __getitem__(self, name: str) -> FakeRole:
        return self.replicas[name]

    async def close(self) -> None:
        for replica in self.replicas.values():
            await replica.stop()
            replica.give_port_back()
