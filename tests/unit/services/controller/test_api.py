"""Both faces of the API over a running controller: the same methods, the same words."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict

from services.controller import telemetry
from services.controller.service import run
from services.controller.settings import ControllerSettings
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.gen.sextet.v1 import controller_pb2_grpc
from shared.rpc.client import Connections, call, stream
from shared.rpc.errors import FailedPrecondition, InvalidArgument, NotFound, Unauthenticated
from shared.state.registry import list_replicas
from tests.fakes.sextet import TOKEN, FakeSextet
from tests.unit.services.controller.conftest import ALL, config


class Served:
    """A served controller and clients of both faces."""

    def __init__(self, endpoint: str, http: str) -> None:
        self.endpoint = endpoint
        self.connections = Connections(TOKEN)
        self.stub = controller_pb2_grpc.ControllerServiceStub(self.connections.channel(endpoint))
        self.http = httpx.AsyncClient(base_url=f"http://{http}", headers={"authorization": f"Bearer {TOKEN}"})

    async def call(self, method: str, request: Any) -> Any:
        return await call(getattr(self.stub, method), request, timeout=20)

    async def close(self) -> None:
        await self.http.aclose()
        await self.connections.close()


@pytest_asyncio.fixture
async def served(store: Any, tmp_path: Path) -> AsyncIterator[Served]:
    url = next(url for url, each in type(store)._stores.items() if each is store)
    settings = ControllerSettings.model_validate(
        {"token": TOKEN, "redis_url": url, "metrics_port": -1, "runs_dir": tmp_path / "runs", "drain_timeout": 1}
    )
    started, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run(settings, started=started, stop=stop))
    await asyncio.wait_for(started.wait(), 10)
    entry = (await list_replicas(store, "controller"))[0]
    served = Served(entry.endpoint, entry.facts["http"])
    yield served
    await served.close()
    stop.set()
    assert await asyncio.wait_for(task, 15) == 0


async def test_a_run_over_grpc(served: Served, fakes: FakeSextet) -> None:
    await fakes.start(*ALL)
    text = json.dumps(config(total_steps=2))
    created = (await served.call("CreateRun", pb.CreateRunRequest(config_json=text, id="r"))).run
    again = (await served.call("CreateRun", pb.CreateRunRequest(config_json=text, id="r"))).run
    assert (created.id, created.name, again.created) == ("r", "run", created.created)
    events = [each.event async for each in stream(served.stub.WatchRun, pb.WatchRunRequest(id="r"), timeout=20)]
    assert (events[-1].kind, events[-1].message) == ("state", "done")
    later = stream(served.stub.WatchRun, pb.WatchRunRequest(id="r", after=events[-3].cursor), timeout=20)
    assert [each.event.cursor async for each in later] == [event.cursor for event in events[-2:]]
    done = (await served.call("GetRun", pb.GetRunRequest(id="r"))).run
    assert (done.state, done.step, done.total_steps) == ("done", 2, 2)
    assert done.metrics["reward"] == done.metrics["reward.score/mean"]
    assert json.loads(done.config_json)["data"]["batch_size"] == 4
    assert [each.id for each in (await served.call("ListRuns", pb.ListRunsRequest())).runs] == ["r"]
    services = (await served.call("ListServices", pb.ListServicesRequest())).services
    assert {each.role for each in services} == {"rollout", "actor", "critic", "reward", "reference", "controller"}


async def test_a_run_over_http(served: Served, fakes: FakeSextet) -> None:
    await fakes.start(*ALL)
    created = await served.http.post("/v1/runs", json={"config": config(total_steps=1), "id": "r"})
    assert (created.status_code, created.json()["id"]) == (201, "r")
    async with served.http.stream("GET", "/v1/runs/r/events", timeout=20) as response:
        events = [json.loads(line) async for line in response.aiter_lines()]
    assert (events[-1]["kind"], events[-1]["message"]) == ("state", "done")
    sse = await served.http.get("/v1/runs/r/events", headers={"accept": "text/event-stream"})
    assert sse.headers["content-type"].startswith("text/event-stream")
    assert f"id: {events[-1]['cursor']}\nevent: state\ndata: " in sse.text
    run = (await served.http.get("/v1/runs/r")).json()
    assert (run["state"], run["step"], run["config"]["total_steps"]) == ("done", 1, 1)
    assert [each["id"] for each in (await served.http.get("/v1/runs")).json()["runs"]] == ["r"]
    services = (await served.http.get("/v1/services")).json()["services"]
    assert {type(each["version"]) for each in services} == {int}
    page = await served.http.get("/openapi.json")
    assert "/v1/runs/{id}/pause" in page.json()["paths"]


@pytest.mark.parametrize(
    ("method", "request_", "http", "status", "error"),
    [
        ("GetRun", pb.GetRunRequest(id="x"), ("GET", "/v1/runs/x", None), 404, NotFound),
        (
            "CreateRun",
            pb.CreateRunRequest(config_json='{"modell": {}}'),
            ("POST", "/v1/runs", {"config": {"modell": {}}}),
            400,
            InvalidArgument,
        ),
        (
            "Scale",
            pb.ScaleRequest(role="rolout", replicas=2),
            ("PUT", "/v1/services/rolout", {"replicas": 2}),
            400,
            InvalidArgument,
        ),
        (
            "Scale",
            pb.ScaleRequest(role="actor", replicas=2),
            ("PUT", "/v1/services/actor", {"replicas": 2}),
            400,
            InvalidArgument,
        ),
        (
            "Scale",
            pb.ScaleRequest(role="reward", replicas=2),
            ("PUT", "/v1/services/reward", {"replicas": 2}),
            409,
            FailedPrecondition,
        ),
        (
            "ProfileRun",
            pb.ProfileRunRequest(id="x"),
            ("POST", "/v1/runs/x/profile", {}),
            404,
            NotFound,
        ),
        (
            "ProfileRun",
            pb.ProfileRunRequest(id="x", role="rollout"),
            ("POST", "/v1/runs/x/profile", {"role": "rollout"}),
            400,
            InvalidArgument,
        ),
        (
            "ProfileRun",
            pb.ProfileRunRequest(id="x", steps=11),
            ("POST", "/v1/runs/x/profile", {"steps": 11}),
            400,
            InvalidArgument,
        ),
    ],
)
async def test_errors_have_the_same_words_on_both_faces(
    served: Served, method: str, request_: Any, http: Any, status: int, error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        await served.call(method, request_)
    answer = await served.http.request(http[0], http[1], json=http[2])
    assert (answer.status_code, answer.json()["error"]) == (status, str(raised.value))


async def test_without_the_token_nothing_is_answered(served: Served) -> None:
    bare = httpx.AsyncClient(base_url=served.http.base_url)
    calls = [("GET", "/v1/runs"), ("POST", "/v1/runs"), ("GET", "/v1/runs/r/events"), ("PUT", "/v1/services/reward")]
    for method, path in calls:
        answer = await bare.request(method, path, headers={"authorization": "Bearer wrong"})
        assert (answer.status_code, answer.json()["code"]) == (401, "UNAUTHENTICATED")
    await bare.aclose()
    others = Connections("wrong")
    stub = controller_pb2_grpc.ControllerServiceStub(others.channel(served.endpoint))
    with pytest.raises(Unauthenticated):
        await call(stub.ListRuns, pb.ListRunsRequest(), timeout=5)
    await others.close()


async def test_a_body_with_an_unknown_key_is_refused_by_name(served: Served) -> None:
    answer = await served.http.post("/v1/runs", json={"confg": {}})
    assert answer.status_code == 400
    assert "body.confg" in answer.json()["error"]


async def test_pause_resume_checkpoint_profile_and_cancel(served: Served, fakes: FakeSextet) -> None:
    await fakes.start(*ALL)
    fakes["actor-0"].hooks["update"] = lambda request: asyncio.sleep(0.05)
    await served.http.post("/v1/runs", json={"config": config(total_steps=500), "id": "r"})

    async def until(state: str) -> None:
        async with asyncio.timeout(20):
            while (await served.http.get("/v1/runs/r")).json()["state"] != state:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    await until("running")
    saved = (await served.http.post("/v1/runs/r/checkpoint", timeout=20)).json()
    assert Path(saved["directory"]).name == f"step_{saved['step']}"
    over_http = (await served.http.post("/v1/runs/r/profile", json={}, timeout=20)).json()["calls"]
    over_grpc = (await served.call("ProfileRun", pb.ProfileRunRequest(id="r"))).calls
    for (recorded,) in (over_http, map(_plain, over_grpc)):
        assert (recorded["call"], recorded["replica"], type(recorded["step"])) == ("actor.update", "actor-0", int)
        assert [rank["communication_share"] for rank in recorded["ranks"]] == [0.1, 0.6]
        assert recorded["ranks"][1]["path"].endswith(f"/traces/step-{recorded['step']}-actor.update-rank-1.json.gz")
        assert recorded["ranks"][0]["top"] == [{"name": "aten::mm", "seconds": 1.0, "calls": 7}]
    await served.call("PauseRun", pb.PauseRunRequest(id="r"))
    await until("paused")
    await served.http.post("/v1/runs/r/resume")
    await until("running")
    assert (await served.call("CancelRun", pb.CancelRunRequest(id="r"))).run.state == "cancelled"
    assert (await served.http.post("/v1/runs/r/resume")).status_code == 409


async def test_what_the_controller_receives_does_not_grow_with_responses(served: Served, fakes: FakeSextet) -> None:
    await fakes.start(*ALL)

    async def received(tokens: int) -> dict[str, float]:
        before = _received()
        fakes["rollout-0"].response_tokens = tokens
        name = f"r{tokens:05}"
        await served.http.post("/v1/runs", json={"config": config(total_steps=2), "id": name})
        await served.http.get(f"/v1/runs/{name}/events", timeout=20)
        return {call: total - before.get(call, 0) for call, total in _received().items()}

    # The first run loads models; the next two differ in the length of responses only.
    await received(5)
    short, long = await received(10), await received(5000)
    assert short["rollout.generate"] > 0
    # Ids and versions may have a digit more; five thousand tokens a row would be seen.
    assert all(abs(long[call] - short[call]) <= 16 for call in short)


def _plain(call: pb.CallProfile) -> dict[str, Any]:
    return {**MessageToDict(call, preserving_proto_field_name=True), "step": call.step}


def _received() -> dict[str, float]:
    samples = next(iter(telemetry.RECEIVED.collect())).samples
    return {sample.labels["call"]: sample.value for sample in samples if sample.name.endswith("_total")}


async def test_settings_that_cannot_be_used_end_with_a_message(capsys: Any, tmp_path: Path) -> None:
    base = {"token": TOKEN, "redis_url": "memory://settings", "metrics_port": -1, "runs_dir": tmp_path}
    assert await run(ControllerSettings.model_validate({**base, "http": "0.0.0.0:0"})) == 2
    assert "--http 0.0.0.0:0 is reachable" in capsys.readouterr().err
    with grpc_port() as port:
        assert await run(ControllerSettings.model_validate({**base, "http": f"127.0.0.1:{port}"})) == 2
    assert f"can't listen on 127.0.0.1:{port}" in capsys.readouterr().err


def grpc_port() -> Any:
    import contextlib
    import socket

    @contextlib.contextmanager
    def listening() -> Any:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield listener.getsockname()[1]

    return listening()
