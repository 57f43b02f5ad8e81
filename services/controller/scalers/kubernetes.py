"""Replicas as pods of a Deployment per role, by its scale subresource (autoscaling/v1) and nothing else."""

import asyncio
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import structlog

from services.controller.scalers import ScalerMissing
from shared.rpc.errors import Aborted, FailedPrecondition, NotFound, PermissionDenied, Unavailable

log = structlog.get_logger()

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token, its namespace and the API server's certificate authority."""
CALL_SECONDS = 15.0
CONFLICTS = 5
"""Times a change is tried on a Deployment that others change at the same moment."""


class KubernetesScaler:
    """See Scaler. Needs `get` and `update` on `deployments/scale` (deploy/k8s/base/controller.yaml).

    Args:
        server: the API server's URL.
        account: directory with `token`, read anew for every call, as the kubelet rotates it.
        namespace: of the Deployments.
        prefix: of their names; the role follows.
    """

    def __init__(
        self, server: str, account: Path, namespace: str, prefix: str = "sextet-", verify: ssl.SSLContext | bool = True
    ) -> None:
        self._account, self._prefix = account, prefix
        self._path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        self._client = httpx.AsyncClient(base_url=server, verify=verify, timeout=CALL_SECONDS)

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> "KubernetesScaler":
        """For the cluster whose pod this process runs in.

        Raises:
            ScalerMissing: it runs in none, or its account is not mounted.
        """
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        if not host:
            raise ScalerMissing("--scaler kubernetes works in a pod only: KUBERNETES_SERVICE_HOST is not set")
        try:
            namespace = environ.get("SEXTET_NAMESPACE") or (account / "namespace").read_text().strip()
            trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise ScalerMissing(
                f"--scaler kubernetes: the service account in {account} can't be read: {error.strerror}; "
                "set automountServiceAccountToken: true for the controller's pod"
            ) from None
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", account, namespace, verify=trusted)

    async def scale(self, role: str, replicas: int) -> tuple[int, int]:
        """See Scaler; which pods go is Kubernetes' choice."""
        for _ in range(CONFLICTS):
            scale = await self._call("GET", role)
            before = int(scale.get("spec", {}).get("replicas", 0))
            scale["spec"] = {"replicas": replicas}
            try:
                # With the resourceVersion that was read: who changed it meanwhile is not overwritten unseen.
                await self._call("PUT", role, scale)
            except Aborted:
                continue
            log.info("scaled", scaled_role=role, before=before, replicas=replicas)
            return before, replicas
        raise Unavailable(f"deployment {self._prefix}{role} is being changed by others; try again")

    async def close(self) -> None:
        """Pods outlive their controller."""
        await self._client.aclose()

    async def _call(self, method: str, role: str, body: Any = None) -> dict[str, Any]:
        name = f"{self._prefix}{role}"
        token = await asyncio.to_thread((self._account / "token").read_text)
        headers = {"authorization": f"Bearer {token.strip()}"}
        try:
            answer = await self._client.request(method, f"{self._path}/{name}/scale", json=body, headers=headers)
        except httpx.HTTPError as error:
            raise Unavailable(f"the Kubernetes API can't be reached: {type(error).__name__}: {error}") from error
        if answer.status_code == 409:
            raise Aborted(_said(answer))
        if answer.status_code in (401, 403):
            raise PermissionDenied(f"{_said(answer)}: the controller needs get and update on deployments/scale")
        if answer.status_code == 404:
            raise NotFound(f"there is no deployment {name!r} to scale: {_said(answer)}")
        if answer.status_code >= 500 or answer.status_code == 429:
            raise Unavailable(f"the Kubernetes API answers {answer.status_code}: {_said(answer)}")
        if answer.is_error:
            raise FailedPrecondition(f"Kubernetes refuses to scale {name}: {_said(answer)}")
        return answer.json()


def _said(answer: httpx.Response) -> str:
    """A Status object's message."""
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or answer.reason_phrase
