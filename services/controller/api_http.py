"""The HTTP/JSON face of the API: the same methods, an OpenAPI page at /docs, events as a stream."""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from google.protobuf.json_format import MessageToDict
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from services.controller.api import Api
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.http import STATUS, Guard
from shared.rpc.errors import SextetError


class Body(BaseModel):
    """Base of request bodies: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class NewRun(Body):
    """A run to create; `config` is shared.config.RunConfig."""

    config: dict[str, Any]
    id: str = ""


class Wanted(Body):
    """Replicas wanted of a role."""

    replicas: int
    at_once: bool = False
    """Answer before the registry lists them."""


class Look(Body):
    """What to record, with PyTorch's profiler."""

    role: str = "actor"
    steps: int = 1


class RunModel(BaseModel):
    """A run."""

    id: str
    name: str
    state: str
    step: int
    total_steps: int
    reason: str
    created: float
    finished: float
    metrics: dict[str, float]
    directory: str
    config: dict[str, Any]


class RunsModel(BaseModel):
    """Runs, the newest first."""

    runs: list[RunModel]


class CheckpointModel(BaseModel):
    """A saved checkpoint."""

    directory: str
    step: int


class TopModel(BaseModel):
    """Own seconds of an operator or kernel, and how often it was called."""

    name: str
    seconds: float
    calls: int


class RankModel(BaseModel):
    """What one rank's profiler has seen."""

    rank: int
    path: str
    seconds: float
    communication_share: float
    compute_share: float
    memory_peak_gib: float
    top: list[TopModel]
    fault: str


class CallModel(BaseModel):
    """A recorded call."""

    step: int
    call: str
    replica: str
    ranks: list[RankModel]


class ProfileModel(BaseModel):
    """All recorded calls."""

    calls: list[CallModel]


class ServiceModel(BaseModel):
    """A registered service."""

    role: str
    replica: str
    endpoint: str
    state: str
    run: str
    version: int
    running: int
    facts: dict[str, str]


class ServicesModel(BaseModel):
    """All registered services."""

    services: list[ServiceModel]


class ScaleModel(BaseModel):
    """Replicas before, and wanted now."""

    before: int
    replicas: int


class Problem(BaseModel):
    """Any failure: a sentence for a person, the gRPC code for programs."""

    error: str
    code: str


def make_app(api: Api, token: str) -> FastAPI:
    """The HTTP application. Every method asks for `Authorization: Bearer <token>`; the OpenAPI page does not."""
    app = FastAPI(title="Sextet controller", description="Runs, their events, and services.", version="1")
    app.add_middleware(Guard, token=token, refusal=lambda text: _problem(401, text, "UNAUTHENTICATED"))
    problems: dict[int | str, dict[str, Any]] = {"4XX": {"model": Problem}, "5XX": {"model": Problem}}
    app.exception_handler(SextetError)(_sextet_problem)
    app.exception_handler(HTTPException)(_http_problem)
    app.exception_handler(RequestValidationError)(_body_problem)
    options: dict[str, Any] = {"responses": problems}

    @app.post("/v1/runs", status_code=201, **options)
    async def create_run(body: NewRun) -> RunModel:
        """Queues a run; the same id again creates nothing new."""
        return _run(await api.create(json.dumps(body.config), body.id))

    @app.get("/v1/runs", **options)
    async def list_runs() -> RunsModel:
        """All runs, the newest first."""
        return RunsModel(runs=[_run(run) for run in await api.list()])

    @app.get("/v1/runs/{id}", **options)
    async def get_run(id: str) -> RunModel:
        """One run."""
        return _run(await api.get(id))

    @app.get("/v1/runs/{id}/events", response_class=StreamingResponse, **options)
    async def watch_run(
        id: str, after: str = Query("", description="cursor"), accept: Annotated[str, Header()] = ""
    ) -> StreamingResponse:
        """Events after a cursor, one JSON object a line; as Server-Sent Events with `Accept: text/event-stream`."""
        await api.get(id)
        if "text/event-stream" in accept:
            return StreamingResponse(_server_sent(api.watch(id, after)), media_type="text/event-stream")
        return StreamingResponse(_lines(api.watch(id, after)), media_type="application/x-ndjson")

    @app.post("/v1/runs/{id}/pause", **options)
    async def pause_run(id: str) -> RunModel:
        """Pauses after the step in progress."""
        return _run(await api.pause(id))

    @app.post("/v1/runs/{id}/resume", **options)
    async def resume_run(id: str) -> RunModel:
        """Goes on with a paused run, or with a failed one from its last checkpoint."""
        return _run(await api.resume(id))

    @app.post("/v1/runs/{id}/cancel", **options)
    async def cancel_run(id: str) -> RunModel:
        """Ends a run now."""
        return _run(await api.cancel(id))

    @app.post("/v1/runs/{id}/checkpoint", **options)
    async def checkpoint_run(id: str) -> CheckpointModel:
        """Saves a checkpoint after the step in progress."""
        directory, step = await api.checkpoint(id)
        return CheckpointModel(directory=directory, step=step)

    @app.post("/v1/runs/{id}/profile", **options)
    async def profile_run(id: str, body: Look | None = None) -> ProfileModel:
        """Records a role's calls in the next steps; answers when they are done."""
        look = body or Look()
        return ProfileModel(calls=[CallModel(**_dict(each)) for each in await api.profile(id, look.role, look.steps)])

    @app.get("/v1/services", **options)
    async def list_services() -> ServicesModel:
        """Registered services."""
        return ServicesModel(services=[ServiceModel(**_dict(each)) for each in await api.services()])

    @app.put("/v1/services/{role}", **options)
    async def scale(role: str, body: Wanted) -> ScaleModel:
        """Adds or removes replicas."""
        before, replicas = await api.scale(role, body.replicas, not body.at_once)
        return ScaleModel(before=before, replicas=replicas)

    return app


def _dict(message: Any) -> dict[str, Any]:
    # Through JSON, 64-bit integers would become strings.
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {name: getattr(message, name) if isinstance(value, str) else value for name, value in fields.items()}


def _run(run: pb.Run) -> RunModel:
    fields = _dict(run)
    return RunModel(**{**fields, "config": json.loads(fields.pop("config_json"))})


async def _lines(events: AsyncIterator[pb.RunEvent]) -> AsyncIterator[str]:
    async for event in events:
        yield json.dumps(_dict(event)) + "\n"


async def _server_sent(events: AsyncIterator[pb.RunEvent]) -> AsyncIterator[str]:
    async for event in events:
        yield f"id: {event.cursor}\nevent: {event.kind}\ndata: {json.dumps(_dict(event))}\n\n"


async def _sextet_problem(request: Request, error: Any) -> JSONResponse:
    return _problem(STATUS.get(error.code, 500), str(error), error.code.name)


async def _http_problem(request: Request, error: Any) -> JSONResponse:
    code = {404: "NOT_FOUND", 413: "RESOURCE_EXHAUSTED"}.get(error.status_code, "INVALID_ARGUMENT")
    return _problem(error.status_code, str(error.detail), code)


async def _body_problem(request: Request, error: Any) -> JSONResponse:
    found = [f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}" for each in error.errors()]
    return _problem(400, "; ".join(found), "INVALID_ARGUMENT")


def _problem(status: int, text: str, code: str) -> JSONResponse:
    return JSONResponse({"error": text, "code": code}, status)
