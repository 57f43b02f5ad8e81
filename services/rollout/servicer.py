"""RolloutService: every method is an operation; what changes weights is on the engine's lane."""

import functools
from typing import Any

from services.rollout.role import RolloutRole
from services.rollout.samples import EARLIER
from shared.gen.sextet.v1 import rollout_pb2 as pb
from shared.gen.sextet.v1 import rollout_pb2_grpc
from shared.rpc.role import ENGINE
from shared.rpc.run import RoleContext

READ_SECONDS = 60.0
"""For the rows that a call goes on with."""


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """See rollout.proto."""

    def __init__(self, context: RoleContext[Any], role: RolloutRole) -> None:
        self._operations, self._store, self._role = context.operations, context.store, role
        self._earlier = functools.partial(context.reader.read, columns=EARLIER, timeout=READ_SECONDS)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        async def work() -> pb.GenerateResponse:
            earlier = await self._earlier(request.earlier) if request.earlier.blocks else None
            made = await self._role.watch.unless_dead(self._role.generate(request, earlier))
            operation = request.operation.id
            ref = self._store.put(made.block, run=operation.run, step=operation.step, tokens=made.tokens)
            return pb.GenerateResponse(block=ref, metrics=made.metrics, oldest=made.oldest, cut=made.cut)

        # In no lane: rows of calls that overlap share the engine, and its commit waits for them.
        return await self._operations.run(request, work)

    async def PrepareWeights(self, request: pb.PrepareWeightsRequest, context: Any) -> pb.PrepareWeightsResponse:
        return await self._operations.run(request, lambda: self._role.prepare(request), lane=ENGINE)

    async def CommitWeights(self, request: pb.CommitWeightsRequest, context: Any) -> pb.CommitWeightsResponse:
        return await self._operations.run(request, lambda: self._role.commit(request), lane=ENGINE, mutates=True)
