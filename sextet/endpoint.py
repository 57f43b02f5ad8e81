"""Where the controller is: named by SEXTET_CONTROLLER, or the services started here (`.sextet/local.json`)."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from shared.rpc.errors import Unavailable

STATE_DIR = Path(".sextet")


@dataclass(frozen=True)
class LocalState:
    """What `.sextet/local.json` (mode 0600) says of the services of this directory.

    Attributes:
        pid: the process that keeps them.
        created: when that process was made, see `made_at`: a pid alone may mean another process later.
        ready: all six services can be used.
        controller: host:port of the gRPC API.
        http: host:port of the HTTP API.
        redis_url: with its password.
    """

    pid: int
    created: float
    ready: bool = False
    controller: str = ""
    http: str = ""
    redis_url: str = ""

    @property
    def alive(self) -> bool:
        try:
            return abs(made_at(self.pid) - self.created) < 1
        except psutil.NoSuchProcess:
            return False


def made_at(pid: int) -> float:
    """When a process was made, in seconds since this machine was started: its clock may be set meanwhile.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    return psutil.Process(pid).create_time() - psutil.boot_time()


def write_state(state: LocalState, directory: Path = STATE_DIR) -> None:
    """Replaces local.json at once; nobody reads half of it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = directory / "local.json.new"
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)
    fresh.write_text(json.dumps(asdict(state), indent=1))
    fresh.replace(directory / "local.json")


def read_state(directory: Path = STATE_DIR) -> LocalState | None:
    """The services of this directory; None when there are none alive."""
    try:
        state = LocalState(**json.loads((directory / "local.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return state if state.alive else None


def find_controller(environ: Mapping[str, str] = os.environ, directory: Path = STATE_DIR) -> str:
    """host:port of the controller's gRPC API.

    Raises:
        Unavailable: none is named, and none runs here.
    """
    if named := environ.get("SEXTET_CONTROLLER"):
        return named
    state = read_state(directory)
    if state is None or not state.ready:
        raise Unavailable(
            "no services run in this directory: start them with `sextet up`, "
            "or name a controller in SEXTET_CONTROLLER=host:port"
        )
    return state.controller
