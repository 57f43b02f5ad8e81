"""ActorService: every method is an operation, on the engine's lane if it computes."""

from functools import partial
from pathlib import Path
from typing import Any

from services.actor.advantages import OPTIONAL, REQUIRED
from services.actor.backend import ActorBackend
from shared.batch import columns, refs
from shared.gen.sextet.v1 import actor_pb2 as pb
from shared.gen.sextet.v1 import actor_pb2_grpc
from shared.rpc.errors import InvalidArgument
from shared.rpc.ranks import Alone, Handlers, Ranks
from shared.rpc.role import ENGINE
from shared.rpc.run import RoleContext
from shared.training.group import ALONE, Group
from shared.training.profiling import profiled
from shared.training.role import BatchPort, by_rank, refuse_gap

SAMPLES = (columns.PROMPT_IDS, columns.RESPONSE_IDS, columns.RESPONSE_MASK)
OVERALL = (columns.OLD_LOGPROBS, columns.REF_LOGPROBS)
"""Columns of a training batch that statistics over all rows are made of."""


class ActorServicer(actor_pb2_grpc.ActorServiceServicer):
    """See actor.proto."""

    def __init__(
        self, context: RoleContext[Any], backend: ActorBackend, group: Group = ALONE, ranks: Ranks | None = None
    ) -> None:
        self._operations, self._batches, self._backend = context.operations, BatchPort(context, group), backend
        self.group, self._ranks = group, ranks or Alone()
        self.handlers: Handlers = {
            pb.ActorServiceComputeLogprobsRequest: self._logprobs,
            pb.ActorServiceUpdateRequest: self._update,
            pb.PublishWeightsRequest: self._publish,
            pb.ExportModelRequest: self._export,
        }

    async def ComputeLogprobs(
        self, request: pb.ActorServiceComputeLogprobsRequest, context: Any
    ) -> pb.ActorServiceComputeLogprobsResponse:
        async def work() -> pb.ActorServiceComputeLogprobsResponse:
            return await self._ranks.together(request, lambda: self._logprobs(request))

        return await self._operations.run(request, work, lane=ENGINE)

    async def ComputeAdvantages(
        self, request: pb.ComputeAdvantagesRequest, context: Any
    ) -> pb.ComputeAdvantagesResponse:
        async def work() -> pb.ComputeAdvantagesResponse:
            rows = await self._batches.read(request.inputs, REQUIRED, OPTIONAL)
            block, metrics = await self._backend.advantages(request.operation.id.run, rows)
            return pb.ComputeAdvantagesResponse(block=self._batches.put(block, request), metrics=metrics)

        return await self._operations.run(request, work, lane=ENGINE)

    async def Update(self, request: pb.ActorServiceUpdateRequest, context: Any) -> pb.ActorServiceUpdateResponse:
        async def work() -> pb.ActorServiceUpdateResponse:
            return await self._ranks.together(request, lambda: self._update(request))

        return await self._operations.run(request, work, lane=ENGINE, mutates=True)

    async def HoldRows(self, request: pb.HoldRowsRequest, context: Any) -> pb.HoldRowsResponse:
        async def work() -> pb.HoldRowsResponse:
            rows = await self._batches.read(request.inputs, refs.column_names(request.inputs))
            metrics = {"rows": len(rows), "bytes": rows.nbytes}
            return pb.HoldRowsResponse(block=self._batches.put(rows, request), metrics=metrics)

        # In no lane: it computes nothing, and runs beside an update.
        return await self._operations.run(request, work)

    async def PublishWeights(self, request: pb.PublishWeightsRequest, context: Any) -> pb.PublishWeightsResponse:
        async def work() -> pb.PublishWeightsResponse:
            return await self._ranks.together(request, lambda: self._publish(request))

        return await self._operations.run(request, work, lane=ENGINE)

    async def ExportModel(self, request: pb.ExportModelRequest, context: Any) -> pb.ExportModelResponse:
        async def work() -> pb.ExportModelResponse:
            if not request.directory:
                raise InvalidArgument("directory is empty: name where the model goes")
            return await self._ranks.together(request, lambda: self._export(request))

        return await self._operations.run(request, work, lane=ENGINE)

    @profiled
    async def _logprobs(self, request: pb.ActorServiceComputeLogprobsRequest) -> pb.ActorServiceComputeLogprobsResponse:
        run = request.operation.id.run
        plan = partial(self._backend.my_rows, run, None)
        samples, outline = await self._batches.share(request.inputs, SAMPLES, plan)
        block, metrics = await self._backend.logprobs(run, samples, outline)
        return pb.ActorServiceComputeLogprobsResponse(block=self._batches.put(block, request), metrics=metrics)

    @profiled
    async def _update(self, request: pb.ActorServiceUpdateRequest) -> pb.ActorServiceUpdateResponse:
        refuse_gap(request, self._backend.version())
        operation, names = request.operation.id, refs.column_names(request.inputs)
        plan = partial(self._backend.my_rows, operation.run, operation.step)
        overall = [name for name in OVERALL if name in names]
        batch, outline = await self._batches.share(request.inputs, names, plan, overall)
        update = self._backend.update(operation.run, operation.step, batch, outline)
        (version, metrics), seconds = await by_rank(self.group, update)
        return pb.ActorServiceUpdateResponse(version=version, metrics={**metrics, **seconds})

    async def _publish(self, request: pb.PublishWeightsRequest) -> pb.PublishWeightsResponse:
        return pb.PublishWeightsResponse(weights=await self._backend.publish(request.operation.id.run))

    async def _export(self, request: pb.ExportModelRequest) -> pb.ExportModelResponse:
        if not request.directory:
            raise InvalidArgument("directory is empty: name where the model goes")
        await self._backend.export(request.operation.id.run, Path(request.directory))
        return pb.ExportModelResponse(directory=request.directory)
