"""CriticService: every method is an operation on the engine's lane."""

from functools import partial
from typing import Any

from services.critic.backend import CriticBackend
from shared.batch import columns
from shared.gen.sextet.v1 import critic_pb2 as pb
from shared.gen.sextet.v1 import critic_pb2_grpc
from shared.rpc.ranks import Alone, Handlers, Ranks
from shared.rpc.role import ENGINE
from shared.rpc.run import RoleContext
from shared.training.group import ALONE, Group
from shared.training.profiling import profiled
from shared.training.role import BatchPort, by_rank, refuse_gap

SAMPLES = (columns.PROMPT_IDS, columns.RESPONSE_IDS, columns.RESPONSE_MASK)
TRAINING = (*SAMPLES, columns.VALUES, columns.RETURNS)


class CriticServicer(critic_pb2_grpc.CriticServiceServicer):
    """See critic.proto."""

    def __init__(
        self, context: RoleContext[Any], backend: CriticBackend, group: Group = ALONE, ranks: Ranks | None = None
    ) -> None:
        self._operations, self._batches, self._backend = context.operations, BatchPort(context, group), backend
        self.group, self._ranks = group, ranks or Alone()
        self.handlers: Handlers = {
            pb.ComputeValuesRequest: self._values,
            pb.CriticServiceUpdateRequest: self._update,
        }

    async def ComputeValues(self, request: pb.ComputeValuesRequest, context: Any) -> pb.ComputeValuesResponse:
        async def work() -> pb.ComputeValuesResponse:
            return await self._ranks.together(request, lambda: self._values(request))

        return await self._operations.run(request, work, lane=ENGINE)

    async def Update(self, request: pb.CriticServiceUpdateRequest, context: Any) -> pb.CriticServiceUpdateResponse:
        async def work() -> pb.CriticServiceUpdateResponse:
            return await self._ranks.together(request, lambda: self._update(request))

        return await self._operations.run(request, work, lane=ENGINE, mutates=True)

    @profiled
    async def _values(self, request: pb.ComputeValuesRequest) -> pb.ComputeValuesResponse:
        run = request.operation.id.run
        samples, outline = await self._batches.share(request.inputs, SAMPLES, partial(self._backend.my_rows, run, None))
        block, metrics = await self._backend.values(run, samples, outline)
        return pb.ComputeValuesResponse(block=self._batches.put(block, request), metrics=metrics)

    @profiled
    async def _update(self, request: pb.CriticServiceUpdateRequest) -> pb.CriticServiceUpdateResponse:
        refuse_gap(request, self._backend.version())
        operation = request.operation.id
        plan = partial(self._backend.my_rows, operation.run, operation.step)
        batch, outline = await self._batches.share(request.inputs, TRAINING, plan, (columns.VALUES, columns.RETURNS))
        update = self._backend.update(operation.run, operation.step, batch, outline)
        (version, metrics), seconds = await by_rank(self.group, update)
        return pb.CriticServiceUpdateResponse(version=version, metrics={**metrics, **seconds})
