"""The scalers: one file per kind, imported when the settings name it."""

import importlib.util
from pathlib import Path

from services.controller.scalers.base import Scaler
from shared.devices import Devices


class ScalerMissing(ValueError):
    """What the scaler needs is not here; the text says what to install or to set."""


def make_scaler(kind: str, log_dir: Path, devices: Devices | None = None) -> Scaler | None:
    """The scaler that `--scaler` names; None for "none".

    Args:
        log_dir: where replicas of the process scaler log.
        devices: on which they compute.

    Raises:
        ScalerMissing: it can't work here.
    """
    if kind == "process":
        from services.controller.scalers.process import ProcessScaler

        return ProcessScaler(log_dir, devices=devices)
    if kind == "docker":
        if importlib.util.find_spec("docker") is None:
            raise ScalerMissing("--scaler docker needs the package docker: pip install 'sextet[docker]'")
        from services.controller.scalers.docker import DockerScaler

        return DockerScaler.here()
    if kind == "kubernetes":
        from services.controller.scalers.kubernetes import KubernetesScaler

        return KubernetesScaler.here()
    return None
