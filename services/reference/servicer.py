"""ReferenceService."""

from functools import partial
from typing import Any

from services.reference.backend import ReferenceBackend
from shared.batch import columns
from shared.gen.sextet.v1 import reference_pb2 as pb
from shared.gen.sextet.v1 import reference_pb2_grpc
from shared.rpc.ranks import Alone, Handlers, Ranks
from shared.rpc.role import ENGINE
from shared.rpc.run import RoleContext
from shared.training.group import ALONE, Group
from shared.training.profiling import profiled
from shared.training.role import BatchPort

SAMPLES = (columns.PROMPT_IDS, columns.RESPONSE_IDS, columns.RESPONSE_MASK)


class ReferenceServicer(reference_pb2_grpc.ReferenceServiceServicer):
    """See reference.proto."""

    def __init__(
        self, context: RoleContext[Any], backend: ReferenceBackend, group: Group = ALONE, ranks: Ranks | None = None
    ) -> None:
        self._operations, self._batches, self._backend = context.operations, BatchPort(context, group), backend
        self.group, self._ranks = group, ranks or Alone()
        self.handlers: Handlers = {pb.ReferenceServiceComputeLogprobsRequest: self._logprobs}

    async def ComputeLogprobs(
        self, request: pb.ReferenceServiceComputeLogprobsRequest, context: Any
    ) -> pb.ReferenceServiceComputeLogprobsResponse:
        async def work() -> pb.ReferenceServiceComputeLogprobsResponse:
            return await self._ranks.together(request, lambda: self._logprobs(request))

        return await self._operations.run(request, work, lane=ENGINE)

    @profiled
    async def _logprobs(
        self, request: pb.ReferenceServiceComputeLogprobsRequest
    ) -> pb.ReferenceServiceComputeLogprobsResponse:
        run = request.operation.id.run
        samples, outline = await self._batches.share(request.inputs, SAMPLES, partial(self._backend.my_rows, run))
        block, metrics = await self._backend.logprobs(run, samples, outline)
        return pb.ReferenceServiceComputeLogprobsResponse(block=self._batches.put(block, request), metrics=metrics)
