"""The controller's settings."""

from pathlib import Path
from typing import Literal

from shared.rpc.settings import ServiceSettings


class ControllerSettings(ServiceSettings):
    """Conducts runs: gRPC and HTTP API, pools of replicas, step loop."""

    role: str = "controller"
    http: str = "127.0.0.1:0"
    """host:port of the HTTP API; port 0 picks a free one (see facts "http")."""
    runs_dir: Path = Path("runs")
    """Where runs without a directory of their own keep checkpoints, metrics and exports."""
    scaler: Literal["none", "process", "docker", "kubernetes"] = "none"
    """How `scale` starts and stops replicas: not at all, as processes, as Compose's containers, or as pods."""
    log_dir: Path = Path(".sextet/logs")
    """Where replicas started by the process scaler log."""
