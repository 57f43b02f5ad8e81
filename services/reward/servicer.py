"""ScoringService: the reward role's own face."""

from typing import Any

from services.reward.role import RewardRole
from services.reward.scoring import INPUTS
from shared.batch import columns, refs
from shared.batch.reader import BatchReader
from shared.batch.store import BatchStore
from shared.gen.sextet.v1 import reward_pb2, reward_pb2_grpc
from shared.rpc.operations import Operations
from shared.rpc.role import ENGINE


class ScoringServicer(reward_pb2_grpc.ScoringServiceServicer):
    """See reward.proto."""

    def __init__(
        self, operations: Operations, store: BatchStore, reader: BatchReader, role: RewardRole, read_timeout: float
    ) -> None:
        self._operations, self._store, self._reader, self._role = operations, store, reader, role
        self._read_timeout = read_timeout

    async def ScoreBatch(self, request: reward_pb2.ScoreBatchRequest, context: Any) -> reward_pb2.ScoreBatchResponse:
        return await self._operations.run(request, lambda: self._score(request), lane=ENGINE)

    async def _score(self, request: reward_pb2.ScoreBatchRequest) -> reward_pb2.ScoreBatchResponse:
        operation = request.operation.id
        samples = await self._reader.read(request.inputs, INPUTS, timeout=self._read_timeout)
        scored, metrics = await self._role.grade(operation.run, samples)
        tokens = refs.row_tokens(request.inputs)
        ref = self._store.put(
            scored, run=operation.run, step=operation.step, tokens=[tokens[key] for key in scored.rows]
        )
        scores = scored[columns.SCORE].scalars()
        return reward_pb2.ScoreBatchResponse(block=ref, metrics=metrics, scores=scores.tolist())
