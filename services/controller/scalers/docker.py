"""Replicas as containers of the Compose project that this controller belongs to.

A new replica is a copy of one that is there: image, command, environment, mounts, networks and labels, as Compose made
them, with the next number. So `docker compose ps`, `logs` and `down` see it as their own.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import docker
import docker.errors
import requests.exceptions
import structlog

from services.controller.scalers import ScalerMissing
from shared.rpc.errors import FailedPrecondition, SextetError, Unavailable

log = structlog.get_logger()
T = TypeVar("T")

PROJECT, SERVICE = "com.docker.compose.project", "com.docker.compose.service"
NUMBER, ONE_OFF = "com.docker.compose.container-number", "com.docker.compose.oneoff"
ENGINE_SECONDS = 60
STOP_SECONDS = 30
"""Between SIGTERM, when a replica drains, and SIGKILL; as stop_grace_period in docker-compose.yml."""


class DockerScaler:
    """See Scaler. Needs the engine's socket, which is as good as root on its machine.

    Args:
        client: of the engine.
        project: the Compose project's name.
    """

    def __init__(self, client: docker.DockerClient, project: str) -> None:
        self._client, self._project = client, project
        self._lock = asyncio.Lock()

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> "DockerScaler":
        """For DOCKER_HOST and the project in COMPOSE_PROJECT_NAME, else that of the container this process runs in.

        Raises:
            ScalerMissing: no engine can be reached, or the project is not known.
        """
        try:
            client = docker.from_env(timeout=ENGINE_SECONDS)
            client.ping()
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            raise ScalerMissing(
                "--scaler docker reaches no Docker engine: set DOCKER_HOST, or mount /var/run/docker.sock and add its "
                f"group (deploy/docker/scale.yml) ({error})"
            ) from None
        project = environ.get("COMPOSE_PROJECT_NAME", "")
        with contextlib.suppress(docker.errors.APIError):
            project = project or client.containers.get(socket.gethostname()).labels.get(PROJECT, "")
        if not project:
            raise ScalerMissing("--scaler docker: this is not a container of Compose: set COMPOSE_PROJECT_NAME")
        return cls(client, project)

    async def scale(self, role: str, replicas: int) -> tuple[int, int]:
        """See Scaler; the youngest go first. One that is stopped stays, as what the next is made from."""
        async with self._lock:
            return await self._answer(lambda: self._scale(role, replicas), role)

    async def close(self) -> None:
        """Compose's containers outlive their controller."""
        await asyncio.to_thread(self._client.close)

    def _scale(self, role: str, replicas: int) -> tuple[int, int]:
        there = self._containers(role)
        if not there:
            raise FailedPrecondition(
                f"the Compose project {self._project!r} has no container of {role}: `docker compose up -d {role}` first"
            )
        running = [each for each in there if each.status in ("running", "restarting", "created")]
        stopped = [each for each in there if each not in running]
        for container in stopped[: max(0, replicas - len(running))]:
            container.start()
        for number in range(len(there) + 1, replicas + 1):
            self._copy(there[0], _number(there[-1]) + number - len(there))
        for container in reversed(running[replicas:]):
            container.stop(timeout=STOP_SECONDS)
            if container.id != there[0].id:
                container.remove()
        log.info("scaled", scaled_role=role, before=len(running), replicas=replicas)
        return len(running), replicas

    def _containers(self, role: str) -> list[Any]:
        labels = [f"{PROJECT}={self._project}", f"{SERVICE}={role}", f"{ONE_OFF}=False"]
        return sorted(self._client.containers.list(all=True, filters={"label": labels}), key=_number)

    def _copy(self, container: Any, number: int) -> None:
        found, role = container.attrs, container.labels[SERVICE]
        config = {name: value for name, value in found["Config"].items() if name != "Hostname"}
        config["Labels"] = {**config["Labels"], NUMBER: str(number)}
        networks = {name: {"Aliases": [role]} for name in found["NetworkSettings"]["Networks"]}
        api = self._client.api
        made = api.create_container_from_config(
            {**config, "HostConfig": found["HostConfig"], "NetworkingConfig": {"EndpointsConfig": networks}},
            name=f"{self._project}-{role}-{number}",
        )
        api.start(made["Id"])

    async def _answer(self, work: Callable[[], T], role: str) -> T:
        try:
            return await asyncio.to_thread(work)
        except SextetError:
            raise
        except docker.errors.APIError as error:
            raise FailedPrecondition(f"Docker refuses to scale {role}: {error.explanation or error}") from error
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            raise Unavailable(f"the Docker engine can't be reached: {error}") from error


def _number(container: Any) -> int:
    return int(container.labels.get(NUMBER, "0"))
