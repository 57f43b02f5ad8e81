"""The gRPC face of the API."""

from collections.abc import AsyncIterator
from typing import Any

from services.controller.api import Api
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.gen.sextet.v1 import controller_pb2_grpc


class ControllerServicer(controller_pb2_grpc.ControllerServiceServicer):
    """See controller.proto."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.CreateRunResponse:
        return pb.CreateRunResponse(run=await self._api.create(request.config_json, request.id))

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=await self._api.get(request.id))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=await self._api.list())

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        async for event in self._api.watch(request.id, request.after):
            yield pb.WatchRunResponse(event=event)

    async def PauseRun(self, request: pb.PauseRunRequest, context: Any) -> pb.PauseRunResponse:
        return pb.PauseRunResponse(run=await self._api.pause(request.id))

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Any) -> pb.ResumeRunResponse:
        return pb.ResumeRunResponse(run=await self._api.resume(request.id))

    async def CancelRun(self, request: pb.CancelRunRequest, context: Any) -> pb.CancelRunResponse:
        return pb.CancelRunResponse(run=await self._api.cancel(request.id))

    async def CheckpointRun(self, request: pb.CheckpointRunRequest, context: Any) -> pb.CheckpointRunResponse:
        directory, step = await self._api.checkpoint(request.id)
        return pb.CheckpointRunResponse(directory=directory, step=step)

    async def ProfileRun(self, request: pb.ProfileRunRequest, context: Any) -> pb.ProfileRunResponse:
        return pb.ProfileRunResponse(
            calls=await self._api.profile(request.id, request.role or "actor", request.steps or 1)
        )

    async def ListServices(self, request: pb.ListServicesRequest, context: Any) -> pb.ListServicesResponse:
        return pb.ListServicesResponse(services=await self._api.services())

    async def Scale(self, request: pb.ScaleRequest, context: Any) -> pb.ScaleResponse:
        before, wanted = await self._api.scale(request.role, request.replicas, not request.at_once)
        return pb.ScaleResponse(before=before, replicas=wanted)
