"""A replica's OpenAI face: models, completions, chat, and sessions that become trainable samples."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from services.rollout.openai.endpoint import Job, chat_job, completion_job
from services.rollout.openai.protocol import HANDLERS, POLICY, ApiError, ChatBody, CompletionBody
from services.rollout.openai.sessions import Session, Sessions, block_of
from services.rollout.role import RolloutRole
from shared.batch import columns
from shared.batch.store import BatchStore
from shared.gen.sextet.v1 import batch_pb2
from shared.http import Guard, unless_gone
from shared.openai import problem
from shared.rpc.errors import InvalidArgument, ResourceExhausted, SextetError

MAX_JOBS = 256
"""Requests in progress at once; more are refused with 429."""
MAX_WAIT = 30.0
"""Seconds that one request waits for a task."""


class NewSession(BaseModel):
    """A conversation to begin; `uid` and `sample` become its row's key, the rest its columns."""

    model_config = ConfigDict(extra="forbid")

    uid: Annotated[str, Field(pattern=r"^[^|]*$")] = ""
    sample: Annotated[int, Field(ge=0)] = 0
    data_source: str = ""
    ground_truth: str = ""
    extra_info: str = "{}"


class Claim(BaseModel):
    """A task wanted; it is waited for."""

    model_config = ConfigDict(extra="forbid")

    seconds: Annotated[float, Field(ge=0, le=MAX_WAIT)] = MAX_WAIT


class Reward(BaseModel):
    """How good a conversation was; null: not graded. A task is done with it."""

    model_config = ConfigDict(extra="forbid")

    reward: Annotated[float, Field(allow_inf_nan=False)] | None


class Export(BaseModel):
    """Sessions to make a batch of; it is kept until the run's step `step` is released."""

    model_config = ConfigDict(extra="forbid")

    sessions: Annotated[list[str], Field(min_length=1)]
    step: Annotated[int, Field(ge=0)]


class Face:
    """The routes' state: one per replica.

    Args:
        role: samples.
        store: keeps exported batches.
        replica: this replica's name.
    """

    def __init__(self, role: RolloutRole, store: BatchStore, replica: str) -> None:
        self._role, self._store = role, store
        self._sessions = Sessions(replica)
        self._jobs = 0

    def models(self) -> dict[str, Any]:
        """The policy in training, as the only model."""
        serving = self._role.serving()
        about = {"run": serving.run, "root": serving.config.model.path, "weight_version": serving.version}
        model = {"id": POLICY, "object": "model", "created": int(time.time()), "owned_by": "sextet"}
        return {"object": "list", "data": [{**model, **about, "max_model_len": serving.context}]}

    async def completion(self, body: CompletionBody, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(await completion_job(self._role, body), request)

    async def chat(self, body: ChatBody, request: Request, session: str = "") -> Response:
        """POST /v1/chat/completions; of a session: the answer becomes its next turn."""
        held = self._session(session) if session else None
        return await self._answer(await chat_job(self._role, body, held), request)

    def start(self, body: NewSession) -> dict[str, Any]:
        """POST /v1/sessions."""
        return _about(self._sessions.start(self._role.serving().run, **body.model_dump()))

    async def claim(self, body: Claim, request: Request) -> Response:
        """POST /v1/sessions/claim: a session for the next task, or 204 when there is none."""
        self._role.serving()
        session = await unless_gone(request, self._claimed(body.seconds))
        if session is None or session.task is None:
            return Response(status_code=204)
        if await request.is_disconnected():
            self.drop(session.id)
        return JSONResponse({**_about(session), "task": session.task.about()})

    async def _claimed(self, seconds: float) -> Session | None:
        task = await self._role.tasks.claim(seconds)
        if task is None:
            return None
        example, key = task.example, task.key
        about = {"data_source": example.data_source, "ground_truth": example.ground_truth, "task": task}
        try:
            # The run may be another one than when the wait began.
            task.session = self._sessions.start(self._role.serving().run, uid=key.uid, sample=key.sample, **about)
        except SextetError:
            self._role.tasks.give_back(task)
            raise
        return task.session

    def look(self, id: str) -> dict[str, Any]:
        """GET /v1/sessions/{id}, with the samples that it would become now."""
        session = self._session(id)
        block = block_of([session], self._role.serving().tokenizer)
        names = (columns.PROMPT_IDS, columns.RESPONSE_IDS, columns.RESPONSE_MASK, columns.VERSIONS)
        rows = [
            {"uid": key.uid, "sample": key.sample, **{name: block[name].rows()[place].tolist() for name in names}}
            for place, key in enumerate(block.rows)
        ]
        return {**_about(session), "rows": rows}

    def grade(self, id: str, body: Reward) -> dict[str, Any]:
        """POST /v1/sessions/{id}/reward."""
        session = self._session(id)
        if session.task and not session.turns:
            raise InvalidArgument(f"session {id} has no turn: there is nothing to grade. DELETE gives its task back")
        session.reward = body.reward
        if session.task:
            session.task.finish()
            self._sessions.drop(id)
        return _about(session)

    def drop(self, id: str) -> None:
        """DELETE /v1/sessions/{id}; a task goes to another agent."""
        if (session := self._sessions.drop(id)) and session.task and session.task.session is session:
            self._role.tasks.give_back(session.task)

    async def export(self, body: Export) -> dict[str, Any]:
        """POST /v1/sessions/export: a BatchRef (protobuf, base64) that roles read and train on; the sessions end."""
        serving = self._role.serving()
        sessions = [self._session(id) for id in body.sessions]
        if empty := [session.id for session in sessions if not session.turns]:
            raise InvalidArgument(f"session {empty[0]} has no turn: there is nothing to train on")
        if tasks := [session.id for session in sessions if session.task]:
            raise InvalidArgument(f"session {tasks[0]} is a task of its run, which takes it when it has a reward")
        block = await asyncio.to_thread(block_of, sessions, serving.tokenizer)
        if len(set(block.rows)) < len(block.rows):
            raise InvalidArgument("two sessions have the same uid and sample: their rows could not be told apart")
        lengths = (block[columns.PROMPT_IDS].lengths + block[columns.RESPONSE_IDS].lengths).tolist()
        ref = self._store.put(block, run=serving.run, step=body.step, tokens=lengths)
        for session in sessions:
            self._sessions.drop(session.id)
        batch = batch_pb2.BatchRef(blocks=[ref]).SerializeToString()
        rows = [{"uid": key.uid, "sample": key.sample, "tokens": n} for key, n in zip(block.rows, lengths, strict=True)]
        return {"run": serving.run, "step": body.step, "rows": rows, "batch": base64.b64encode(batch).decode()}

    def _session(self, id: str) -> Session:
        return self._sessions.get(id, self._role.serving().run)

    async def _answer(self, job: Job, request: Request) -> Response:
        if self._jobs >= MAX_JOBS:
            raise ResourceExhausted(f"{MAX_JOBS} requests are in progress on this replica: try again later")
        if job.body.stream:
            return StreamingResponse(self._counted(job), media_type="text/event-stream")
        self._jobs += 1
        try:
            await unless_gone(request, job.finish())
        finally:
            self._jobs -= 1
        return JSONResponse(job.answer())

    async def _counted(self, job: Job) -> AsyncIterator[str]:
        self._jobs += 1
        try:
            async for event in job.events():
                yield event
        finally:
            self._jobs -= 1


def make_app(face: Face, token: str) -> FastAPI:
    """The application: everything behind the token. A session's chat has a base URL of its own, for any client."""
    app = FastAPI(title="Sextet policy", description="The policy in training, as OpenAI's API.", version="1")
    app.add_middleware(Guard, token=token, refusal=lambda text: problem(text, 401, code="invalid_api_key"))
    for error, handler in HANDLERS.items():
        app.exception_handler(error)(handler)
    app.include_router(_policy(face), prefix="/v1")
    app.include_router(_sessions(face), prefix="/v1/sessions")

    @app.post("/sessions/{id}/v1/chat/completions")
    async def session_chat(id: str, body: ChatBody, request: Request) -> Response:
        """The session's next turn."""
        return await face.chat(body, request, id)

    return app


def _policy(face: Face) -> APIRouter:
    router = APIRouter()

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """The policy in training."""
        return face.models()

    @router.get("/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        """The policy in training, by name."""
        [found] = face.models()["data"]
        if name not in (found["id"], found["run"]):
            raise ApiError(f"there is no model {name!r}", status=404, param="model", code="model_not_found")
        return found

    @router.post("/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Text or token ids, gone on with."""
        return await face.completion(body, request)

    @router.post("/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        """An answer to messages."""
        return await face.chat(body, request)

    return router


def _sessions(face: Face) -> APIRouter:
    router = APIRouter()

    @router.post("")
    async def start(body: NewSession) -> dict[str, Any]:
        """Begins a conversation; its chat is at `base_url`."""
        return face.start(body)

    @router.post("/claim")
    async def claim(body: Claim, request: Request) -> Response:
        """Begins a conversation about the run's next task; waits for one."""
        return await face.claim(body, request)

    @router.post("/export")
    async def export(body: Export) -> dict[str, Any]:
        """Makes a batch of finished conversations."""
        return await face.export(body)

    @router.get("/{id}")
    async def look(id: str) -> dict[str, Any]:
        """A conversation as the rows it would become."""
        return face.look(id)

    @router.post("/{id}/reward")
    async def grade(id: str, body: Reward) -> dict[str, Any]:
        """Grades a conversation."""
        return face.grade(id, body)

    @router.delete("/{id}", status_code=204)
    async def drop(id: str) -> None:
        """Forgets a conversation."""
        face.drop(id)

    return router


def _about(session: Session) -> dict[str, Any]:
    about = {"id": session.id, "object": "session", "base_url": f"/sessions/{session.id}/v1", "run": session.run}
    return {**about, "turns": len(session.turns), "samples": len(session.chains()), "reward": session.reward}
