"""The controller's settings."""

import os
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

from pydantic import field_validator, model_validator

from services.controller.verbs import ROLES
from shared.devices import Devices, parse_devices
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
    devices: str = ""
    """Process scaler: GPUs of roles, "actor=0,1 rollout=2 rollout=3 critic=0"; see `sextet up --help`."""

    @field_validator("devices")
    @classmethod
    def _devices_are_there(cls, devices: str) -> str:
        parse_devices(devices.split(), ROLES, os.environ)
        return devices

    @model_validator(mode="after")
    def _devices_have_a_scaler(self) -> Self:
        if self.devices and self.scaler != "process":
            raise ValueError(f"devices={self.devices!r} needs --scaler process, which starts the roles here")
        return self

    @cached_property
    def placed(self) -> Devices:
        """`devices`, read."""
        return parse_devices(self.devices.split(), ROLES, os.environ)
