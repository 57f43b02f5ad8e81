"""A fake Kubernetes API server: Deployments' scale subresource with its semantics, and nothing else.

As the real one (API reference, Scale autoscaling/v1; API concepts, resource versions): a bearer token is asked for,
and a verb that the account's rules do not name is forbidden; GET answers spec and status; PUT with a resourceVersion
that is not the present one is a conflict; every write makes a new resourceVersion; negative replicas are invalid;
failures are Status objects. Status follows spec only when `reconcile` is called: pods take their time.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


@dataclass
class FakeKubernetes:
    """The cluster's state: replicas by namespace and Deployment."""

    token: str
    deployments: dict[tuple[str, str], int]
    verbs: frozenset[str] = frozenset({"get", "update"})
    status: dict[tuple[str, str], int] = field(default_factory=dict)
    version: int = 100
    meddle: int = 0
    """So many times somebody else changes the Deployment between a GET and a PUT."""
    url: str = ""

    def reconcile(self) -> None:
        self.status = dict(self.deployments)

    def scale_of(self, key: tuple[str, str]) -> dict[str, Any]:
        namespace, name = key
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name, "namespace": namespace, "resourceVersion": str(self.version)},
            "spec": {"replicas": self.deployments[key]},
            "status": {"replicas": self.status.get(key, 0), "selector": f"app={name}"},
        }

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.api_route("/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale", methods=["GET", "PUT"])
        async def scale(namespace: str, name: str, request: Request) -> JSONResponse:
            if request.headers.get("authorization") != f"Bearer {self.token}":
                return _status(401, "Unauthorized", "Unauthorized")
            verb = {"GET": "get", "PUT": "update"}[request.method]
            if verb not in self.verbs:
                return _status(403, "Forbidden", f'deployments.apps "{name}" is forbidden: cannot {verb} resource')
            key = namespace, name
            if key not in self.deployments:
                return _status(404, "NotFound", f'deployments.apps "{name}" not found')
            if request.method == "GET":
                answer = self.scale_of(key)
                if self.meddle:
                    self.meddle, self.version = self.meddle - 1, self.version + 1
                return JSONResponse(answer)
            body = await request.json()
            given = body.get("metadata", {}).get("resourceVersion")
            if given is not None and given != str(self.version):
                return _status(409, "Conflict", f'Operation cannot be fulfilled on deployments.apps "{name}"')
            wanted = body.get("spec", {}).get("replicas", 0)
            if wanted < 0:
                return _status(422, "Invalid", "spec.replicas: must be greater than or equal to 0")
            self.deployments[key], self.version = wanted, self.version + 1
            return JSONResponse(self.scale_of(key))

        return app

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeKubernetes"]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(uvicorn.Config(self.app(), log_config=None, lifespan="off"))
            task = asyncio.create_task(server.serve(sockets=[listener]))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            try:
                yield self
            finally:
                server.should_exit = True
                await task


def _status(code: int, reason: str, message: str) -> JSONResponse:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason}
    return JSONResponse({**body, "code": code}, code)
