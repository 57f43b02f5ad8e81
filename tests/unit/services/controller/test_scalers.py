"""Scalers: Kubernetes against a fake API server, processes; `scale` waits for the registry; what can not work here."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.controller import api as api_module
from services.controller.api import Api
from services.controller.scalers import ScalerMissing, make_scaler
from services.controller.scalers.kubernetes import KubernetesScaler
from services.controller.scalers.process import ProcessScaler
from services.controller.settings import ControllerSettings
from shared.rpc.errors import DeadlineExceeded, NotFound, PermissionDenied, SextetError, Unavailable
from shared.rpc.settings import SettingsError
from shared.state import open_store
from shared.state.registry import Registration, ReplicaState
from tests.fakes.kubernetes_api import FakeKubernetes

KEY = ("training", "sextet-rollout")


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes("secret", {KEY: 1}).serving() as fake:
        yield fake


@pytest_asyncio.fixture
async def scaler(cluster: FakeKubernetes, tmp_path: Path) -> AsyncIterator[KubernetesScaler]:
    (tmp_path / "token").write_text("secret\n")
    scaler = KubernetesScaler(cluster.url, tmp_path, "training")
    yield scaler
    await scaler.close()


async def test_kubernetes_scales_by_the_subresource(cluster: FakeKubernetes, scaler: KubernetesScaler) -> None:
    assert await scaler.scale("rollout", 4) == (1, 4)
    assert cluster.deployments[KEY] == 4
    assert await scaler.scale("rollout", 0) == (4, 0)
    # Others change it at the same moment: read again, and written on what they left.
    cluster.deployments[KEY], cluster.meddle = 2, 2
    assert await scaler.scale("rollout", 3) == (2, 3)
    assert (cluster.deployments[KEY], cluster.meddle) == (3, 0)
    cluster.meddle = 99
    with pytest.raises(Unavailable, match="being changed by others"):
        await scaler.scale("rollout", 5)
    assert cluster.deployments[KEY] == 3


async def test_what_kubernetes_refuses_is_said(cluster: FakeKubernetes, scaler: KubernetesScaler, tmp_path) -> None:
    with pytest.raises(NotFound, match="no deployment 'sextet-reward'"):
        await scaler.scale("reward", 1)
    cluster.verbs = frozenset({"get"})
    with pytest.raises(PermissionDenied, match="cannot update resource: the controller needs get and update"):
        await scaler.scale("rollout", 2)
    cluster.verbs = frozenset({"get", "update"})
    (tmp_path / "token").write_text("stale")
    with pytest.raises(PermissionDenied, match="Unauthorized"):
        await scaler.scale("rollout", 2)
    # The kubelet puts a new token there; it is read for every call.
    (tmp_path / "token").write_text("secret")
    assert await scaler.scale("rollout", 2) == (1, 2)
    elsewhere = KubernetesScaler("http://127.0.0.1:9", tmp_path, "training")
    with pytest.raises(Unavailable, match="can't be reached"):
        await elsewhere.scale("rollout", 2)
    await elsewhere.close()


def test_scalers_that_cannot_work_here_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_scaler("none", tmp_path) is None
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ScalerMissing, match="KUBERNETES_SERVICE_HOST is not set"):
        make_scaler("kubernetes", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ScalerMissing, match=r"service account in .* can't be read"):
        KubernetesScaler.here(account=tmp_path)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(ScalerMissing, match="reaches no Docker engine: set DOCKER_HOST"):
        make_scaler("docker", tmp_path)
    with pytest.raises(SettingsError, match=r"--scaler .* = 'dockr': Input should be 'none', 'process', 'docker'"):
        ControllerSettings.load([], {"SEXTET_SCALER": "dockr", "SEXTET_TOKEN": "t" * 16})


def test_devices_are_refused_with_their_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    token = {"SEXTET_TOKEN": "t" * 16}
    read = ControllerSettings.load(["--scaler", "process"], {**token, "SEXTET_DEVICES": "actor=0,1  critic=1"})
    assert read.placed.of == {"actor": [["4", "5"]], "critic": [["5"]]}
    assert ControllerSettings.load([], token).placed.of == {}
    with pytest.raises(SettingsError, match=r"--devices \(SEXTET_DEVICES\) = 'actr=0': .* did you mean actor=0"):
        ControllerSettings.load(["--scaler", "process", "--devices", "actr=0"], token)
    with pytest.raises(SettingsError, match="devices='actor=0' needs --scaler process"):
        ControllerSettings.load(["--devices", "actor=0"], token)


class FakeScaler:
    """Registers and deregisters replicas, each a while later."""

    def __init__(self, url: str, late: float, broken: bool = False) -> None:
        self._store, self._late, self._broken = open_store(url), late, broken
        self._there: list[Registration] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def scale(self, role: str, replicas: int) -> tuple[int, int]:
        before = len(self._there)
        self._tasks.append(asyncio.create_task(self._change(role, 0 if self._broken else replicas)))
        return before, replicas

    async def _change(self, role: str, replicas: int) -> None:
        await asyncio.sleep(self._late)
        while len(self._there) < replicas:
            name = f"{role}-{len(self._there)}"
            entry = Registration(self._store, role, name, "127.0.0.1:1", name, ReplicaState, 5.0, {})
            await entry.start()
            self._there.append(entry)
        while len(self._there) > replicas:
            await self._there.pop().stop()

    async def close(self) -> None:
        await asyncio.gather(*self._tasks)
        await self._change("", 0)


async def test_scale_answers_when_the_registry_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://scalers-wait"
    scaler = FakeScaler(url, 0.3)
    api = Api(open_store(url), None, None, scaler)  # type: ignore[arg-type] - neither runs nor pools are asked
    monkeypatch.setattr(api_module, "SCALE_LOOK_SECONDS", 0.02)
    assert await api.scale("rollout", 2, wait=True) == (0, 2)
    assert len(await api._listed("rollout")) == 2
    assert await api.scale("rollout", 1, wait=True) == (2, 1)
    assert len(await api._listed("rollout")) == 1
    assert await api.scale("rollout", 3, wait=False) == (1, 3)
    assert len(await api._listed("rollout")) == 1
    await scaler.close()


async def test_replicas_that_never_register_are_told_about(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://scalers-never"
    api = Api(open_store(url), None, None, FakeScaler(url, 0, broken=True))  # type: ignore[arg-type] - as above
    monkeypatch.setattr(api_module, "SCALE_SECONDS", 0.5)
    with pytest.raises(DeadlineExceeded, match=r"rollout: 0 of 2 replicas are listed after 0.5 s \(none\)") as caught:
        await api.scale("rollout", 2, wait=True)
    assert isinstance(caught.value, SextetError)


ENDURES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(99)
"""


async def test_a_process_whose_stopping_was_given_up_is_stopped_the_next_time(tmp_path: Path) -> None:
    """A client that went away meanwhile left one that nobody could stop, and its role could never be scaled again."""
    scaler = ProcessScaler(tmp_path, command=lambda role: (sys.executable, "-c", ENDURES), drain=99)
    try:
        assert await scaler.scale("reward", 2) == (0, 2)
        first, second = (each.process for each in scaler.list())
        async with asyncio.timeout(60):
            while any("up" not in each.log.read_text() for each in scaler.list()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        keeper, going = scaler._keepers["reward-1"], asyncio.create_task(scaler.scale("reward", 1))
        await asyncio.wait({keeper})
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        scaler._drain = 0.1
        assert await scaler.scale("reward", 2) == (1, 2)
        assert second.returncode is not None
        os.kill(first.pid, 0)
    finally:
        scaler._drain = 0.1
        await scaler.close()
    assert not scaler.list()
