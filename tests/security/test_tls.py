"""Mutual TLS on real servers: who has the right certificate is served, everybody else is told why not."""

import asyncio
import http.client
import os
import shutil
import ssl
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from sextet.certs import make_certificates
from shared.gen.sextet.v1 import batch_pb2, batch_pb2_grpc, role_pb2, role_pb2_grpc
from shared.rpc import errors
from shared.rpc.access import ALLOWED, EVERYBODY, ROLES, callers
from shared.rpc.client import Connections, call, stream
from shared.rpc.probe import serving
from shared.rpc.settings import ServiceSettings, SettingsError
from shared.rpc.tls import Tls, TlsError, handshake_problem, load_tls
from shared.state import open_store
from shared.state.registry import list_replicas
from tests.fakes.blocks import samples
from tests.fakes.role import TOKEN, fake_role
from tests.security.methods import Method, sextet_methods, standard_methods
from tests.security.serving import real_controller


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    make_certificates(directory)
    return directory


@pytest.fixture(autouse=True)
def _no_other_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SEXTET_"):
            monkeypatch.delenv(name)


def of(role: str, directory: Path) -> Tls:
    tls = load_tls(role, {"SEXTET_TLS_DIR": str(directory)})
    assert tls
    return tls


async def reading(channel: grpc.aio.Channel) -> None:
    stub = batch_pb2_grpc.DataServiceStub(channel)
    async for _ in stream(stub.Read, batch_pb2.ReadRequest(block="nowhere"), timeout=5):
        pass


async def asked(channel: grpc.aio.Channel, method: Method) -> None:
    await call(getattr(role_pb2_grpc.RoleServiceStub(channel), method.name), method.request(), timeout=5)


async def describe(endpoint: str, tls: Tls | None) -> str:
    connections = Connections(TOKEN, tls=tls)
    try:
        stub = role_pb2_grpc.RoleServiceStub(connections.channel(endpoint))
        return (await call(stub.Describe, role_pb2.DescribeRequest(), timeout=5)).role
    finally:
        await connections.close()


def test_the_list_covers_every_method_and_names_no_other() -> None:
    paths = {method.path for method in [*sextet_methods(), *standard_methods()]}
    listed = {
        f"/{service}/{name}"
        for services in (*ALLOWED.values(), EVERYBODY)
        for service, names in services.items()
        for name in names
    }
    assert paths - listed == set(), "nobody may call them under TLS: say in shared/rpc/access.py who may"
    assert listed - paths <= {"/grpc.health.v1.Health/List"}


def test_each_role_may_do_its_own_part_only() -> None:
    by_service: dict[str, set[str]] = {}
    for method in sextet_methods():
        by_service.setdefault(method.service.removeprefix("sextet.v1."), set()).update(callers(method.path))
    trainers = {"actor", "critic", "reference"}
    assert by_service == {
        "RoleService": {"controller"}, "RolloutService": {"controller"}, "ActorService": {"controller"},
        "CriticService": {"controller"}, "ReferenceService": {"controller"}, "ScoringService": {"controller"},
        "ControllerService": {"client", "controller"}, "DataService": trainers | {"reward", "rollout"},
        "WeightsService": {"rollout"}, "RewardService": {"reward"},
    }  # fmt: skip
    assert callers("/sextet.v1.RoleService/Unknown") == []


async def test_every_role_gets_what_it_may_and_nothing_else(certs: Path) -> None:
    async with fake_role(role="actor", tls_dir=str(certs)) as running:
        for role in ROLES:
            connections = Connections(TOKEN, tls=of(role, certs))
            channel = connections.channel(running.endpoint)
            for method in sextet_methods():
                if method.service not in ("sextet.v1.RoleService", "sextet.v1.DataService"):
                    continue
                if role in callers(method.path):
                    continue
                work = reading(channel) if method.streams[1] else asked(channel, method)
                with pytest.raises(errors.PermissionDenied, match=f"of role {role}; {method.path} is for "):
                    await work
            await connections.close()
        assert await describe(running.endpoint, of("controller", certs)) == "actor"
        connections = Connections(TOKEN, tls=of("critic", certs))
        with pytest.raises(errors.NotFound, match=r"nowhere"):
            await reading(connections.channel(running.endpoint))
        await connections.close()


async def test_a_role_reads_what_another_one_holds(certs: Path) -> None:
    tls = {"tls_dir": str(certs)}
    async with fake_role(role="actor", **tls) as holder, fake_role(role="critic", **tls) as critic:
        block = samples()
        ref = holder.context.store.put(block, run="r", step=1, tokens=[1] * len(block))
        read = await critic.context.reader.read(batch_pb2.BatchRef(blocks=[ref]), timeout=5)
        assert read.digest() == block.digest()


async def test_the_token_is_needed_as_well(certs: Path) -> None:
    async with fake_role(role="actor", tls_dir=str(certs)) as running:
        connections = Connections("wrong-token-of-a-stranger", tls=of("controller", certs))
        stub = role_pb2_grpc.RoleServiceStub(connections.channel(running.endpoint))
        with pytest.raises(errors.Unauthenticated, match=r"SEXTET_TOKEN"):
            await call(stub.Describe, role_pb2.DescribeRequest(), timeout=5)
        await connections.close()


async def test_no_certificate(certs: Path) -> None:
    async with fake_role(role="actor", tls_dir=str(certs)) as running:
        with pytest.raises(errors.Unauthenticated, match=r"speaks TLS and this process has no certificate: set SEXTET"):
            await describe(running.endpoint, None)


async def test_tls_without_a_certificate_of_ones_own(certs: Path) -> None:
    async with fake_role(role="actor", tls_dir=str(certs)) as running:
        credentials = grpc.ssl_channel_credentials((certs / "ca.pem").read_bytes())
        options = (("grpc.ssl_target_name_override", "sextet"),)
        async with grpc.aio.secure_channel(running.endpoint, credentials, options) as channel:
            stub = role_pb2_grpc.RoleServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Describe(
                    role_pb2.DescribeRequest(), timeout=5, metadata=[("authorization", f"Bearer {TOKEN}")]
                )
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_another_ca(certs: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    mixed = replace(of("controller", tmp_path), ca=(certs / "ca.pem").read_bytes())
    async with fake_role(role="actor", tls_dir=str(certs)) as running:
        with pytest.raises(errors.Unauthenticated, match=r"certificate is not accepted: unable to get local issuer"):
            await describe(running.endpoint, of("controller", tmp_path))
        # It trusts the server, and the server does not trust it.
        with pytest.raises(
            errors.Unauthenticated, match=r"does not accept the certificate .*controller.pem, which is val"
        ):
            await describe(running.endpoint, mixed)


async def test_an_expired_certificate(certs: Path, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    shutil.copytree(certs, ended)
    make_certificates(ended, renew=True, valid=timedelta(seconds=-1))
    with pytest.raises(TlsError, match=r"controller.pem has expired on .*sextet certs --renew"):
        of("controller", ended)
    old = of("controller", certs)
    files = {"cert_file": ended / "controller.pem", "key_file": ended / "controller-key.pem"}
    old = replace(
        old,
        **files,
        cert=files["cert_file"].read_bytes(),
        key=files["key_file"].read_bytes(),
        expires=datetime.now(UTC),
    )
    async with fake_role(role="actor", tls_dir=str(certs)) as running:
        with pytest.raises(errors.Unauthenticated, match=r"which has expired on 20"):
            await describe(running.endpoint, old)


async def test_a_persons_certificate_cannot_serve(certs: Path) -> None:
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", of("client", certs).server_credentials())
    await server.start()
    with pytest.raises(errors.Unauthenticated, match=r"not accepted"):
        await describe(f"127.0.0.1:{port}", of("controller", certs))
    await server.stop(0)


async def test_a_plain_server_and_nobody(certs: Path) -> None:
    async with fake_role() as running:
        with pytest.raises(errors.Unauthenticated, match=r"does not speak TLS, and this process has certificates"):
            await describe(running.endpoint, of("controller", certs))
    with pytest.raises(errors.Unavailable, match=r"refused"):
        await describe(running.endpoint, of("controller", certs))
    assert handshake_problem("nonsense", None) == handshake_problem("127.0.0.1:1", of("client", certs)) == ""


async def test_a_silent_server_costs_seconds_and_no_more() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(20):
        assert await asyncio.to_thread(handshake_problem, endpoint, None) == ""
    server.close()


async def test_the_probe_shows_the_certificate_it_finds(
    certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("actor.pem", "actor-key.pem", "ca.pem"):
        shutil.copy(certs / name, tmp_path / name)
    async with fake_role(role="actor", tls_dir=str(tmp_path)) as running:
        assert not await asyncio.to_thread(serving, running.endpoint, 2.0)
        monkeypatch.setenv("SEXTET_TLS_DIR", str(tmp_path))
        assert await asyncio.to_thread(serving, running.endpoint, 20.0)
        monkeypatch.setenv("SEXTET_TLS_DIR", str(certs))
        assert await asyncio.to_thread(serving, running.endpoint, 20.0)


async def test_metrics_are_served_over_https(certs: Path) -> None:
    async with fake_role(role="actor", tls_dir=str(certs), metrics_port=0, redis_url="memory://tls-metrics"):
        entry = (await list_replicas(open_store("memory://tls-metrics"), "actor"))[0]
        context = ssl.create_default_context(cafile=str(certs / "ca.pem"))

        def fetched(scheme: str) -> str:
            url = f"{scheme}://{entry.facts['metrics']}/metrics"
            return urllib.request.urlopen(url, timeout=5, context=context).read().decode()

        assert "sextet_service_info" in await asyncio.to_thread(fetched, "https")
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            await asyncio.to_thread(fetched, "http")


async def test_the_http_api_is_served_over_https(certs: Path, tmp_path: Path) -> None:
    async with real_controller(tmp_path, tls_dir=str(certs)) as entry:
        context = ssl.create_default_context(cafile=str(certs / "ca.pem"))

        def answer(token: str) -> int:
            request = urllib.request.Request(f"https://{entry.facts['http']}/v1/runs")
            request.add_header("authorization", f"Bearer {token}")
            try:
                return urllib.request.urlopen(request, timeout=5, context=context).status
            except urllib.error.HTTPError as error:
                return error.code

        assert await asyncio.to_thread(answer, TOKEN) == 200
        assert await asyncio.to_thread(answer, "wrong") == 401
        with pytest.raises(errors.PermissionDenied, match=r"is of role rollout; .*ListRuns is for controller, client"):
            await list_runs(entry.endpoint, of("rollout", certs))
        assert await list_runs(entry.endpoint, of("client", certs)) == []


async def list_runs(endpoint: str, tls: Tls) -> list[Any]:
    from shared.gen.sextet.v1 import controller_pb2, controller_pb2_grpc

    connections = Connections(TOKEN, tls=tls)
    try:
        stub = controller_pb2_grpc.ControllerServiceStub(connections.channel(endpoint))
        return list((await call(stub.ListRuns, controller_pb2.ListRunsRequest(), timeout=5)).runs)
    finally:
        await connections.close()


class CriticSettings(ServiceSettings):
    role: str = "critic"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "critic.pem").unlink(), r"critic\.pem can't be read .*`sextet certs`"),
        (lambda d: (d / "critic-key.pem").unlink(), r"critic-key\.pem can't be read"),
        (lambda d: (d / "critic.pem").write_text("x"), r"critic\.pem is no PEM certificate"),
        (lambda d: (d / "ca.pem").write_text("x"), r"ca\.pem is no PEM certificate"),
        (lambda d: shutil.copy(d / "actor.pem", d / "critic.pem"), r"critic\.pem is of role actor, and this is critic"),
        (lambda d: shutil.copy(d / "actor-key.pem", d / "critic-key.pem"), r"critic-key\.pem is not the key of"),
    ],
)
def test_certificates_that_cannot_be_used_stop_the_start(
    certs: Path, tmp_path: Path, change: Any, message: str
) -> None:
    directory = tmp_path / "certs"
    shutil.copytree(certs, directory)
    environ = {"SEXTET_TOKEN": TOKEN, "SEXTET_TLS_DIR": str(directory)}
    assert CriticSettings.load([], environ).tls
    change(directory)
    with pytest.raises(SettingsError, match=message):
        CriticSettings.load([], environ)


def test_one_of_three_variables_is_not_enough(certs: Path) -> None:
    with pytest.raises(TlsError, match=r"SEXTET_TLS_KEY and SEXTET_TLS_CA must be set, too"):
        load_tls("actor", {"SEXTET_TLS_CERT": str(certs / "actor.pem")})
    files = {"CERT": "actor.pem", "KEY": "actor-key.pem", "CA": "ca.pem"}
    named = load_tls("actor", {f"SEXTET_TLS_{kind}": str(certs / name) for kind, name in files.items()})
    assert named
    assert (named.role, named.cert) == ("actor", (certs / "actor.pem").read_bytes())
    assert load_tls("actor", {}) is None


def test_a_service_whose_certificate_is_no_good_exits_with_a_message(certs: Path) -> None:
    environ = {**os.environ, "SEXTET_TOKEN": TOKEN, "SEXTET_TLS_DIR": str(certs), "SEXTET_REDIS_URL": "memory://"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.role"], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "fake.pem can't be read" in done.stderr


def test_made_once_kept_and_renewed(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    first = make_certificates(directory, ["sextet.example.com", "10.1.2.3"])
    assert [each.role for each in first] == ["CA", *ROLES]
    assert all(each.made for each in first)
    keys = sorted(directory.glob("*-key.pem"))
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert len(keys) == len(ROLES) + 1
    files = {path: path.read_bytes() for path in directory.iterdir()}
    again = make_certificates(directory)
    assert not any(each.made for each in again)
    assert {path: path.read_bytes() for path in directory.iterdir()} == files
    renewed = make_certificates(directory, renew=True)
    assert [each.made for each in renewed] == [False, *[True] * len(ROLES)]
    assert (directory / "ca.pem").read_bytes() == files[directory / "ca.pem"]
    names = x509.load_pem_x509_certificate(files[directory / "reward.pem"]).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert {"sextet", "localhost", "sextet.example.com"} <= set(names.value.get_values_for_type(x509.DNSName))
    assert names.value.get_values_for_type(x509.UniformResourceIdentifier) == ["sextet://role/reward"]


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "other.pem").write_text("x")
    with pytest.raises(TlsError, match=r"has other.pem and no ca.pem"):
        make_certificates(tmp_path)
    make_certificates(tmp_path / "certs")
    (tmp_path / "certs" / "ca-key.pem").unlink()
    make_certificates(tmp_path / "certs")
    with pytest.raises(TlsError, match=r"only where the CA's key is"):
        make_certificates(tmp_path / "certs", renew=True)
    with pytest.raises(TlsError, match=r"--hosts 'ümlaut' is neither a name nor an address"):
        make_certificates(tmp_path / "hosts", ["ümlaut"])


def test_the_command_shows_what_it_did(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sextet", "certs", "--dir", str(tmp_path / "c"), "--hosts", "a.example.com"]
    first = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("made") == len(ROLES) + 1
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.stdout.count("kept") == len(ROLES) + 1
    assert f"{(datetime.now(UTC) + timedelta(days=365)):%Y-%m-%d}" in again.stdout
