"""Estimators and losses of the user's own: `module:name` or `path/to/file.py:name` in the run's configuration."""

import importlib
from pathlib import Path
from typing import Any

from shared.algo import ADVANTAGES, GROUPED_ADVANTAGES, POLICY_LOSSES
from shared.algo.registry import Registry
from shared.config import RunConfig
from shared.userfile import load_file

_registered: dict[Path, set[tuple[str, str]]] = {}
"""What each loaded file has registered: (kind, name)."""


def load_custom(config: RunConfig) -> RunConfig:
    """Imports what `algorithm.advantage` and `algorithm.policy_loss` point to.

    The module registers its functions with `register_advantage` and `register_policy_loss`. Files are read anew every
    time: what was changed between two runs of a long-lived service counts.

    Returns:
        The configuration with registered names in their place.

    Raises:
        ValueError: naming the key, when there is no such module or file, it fails, or it registers nothing so named.
    """
    algorithm = config.algorithm
    names = {"advantage": algorithm.advantage, "policy_loss": algorithm.policy_loss}
    places = {key: spec.rpartition(":")[0] for key, spec in names.items() if ":" in spec}
    for place in dict.fromkeys(places.values()):
        _load(place, next(f"algorithm.{key}={names[key]!r}" for key in places if places[key] == place))
    found = {key: spec.rpartition(":")[2] for key, spec in names.items()}
    return config.model_copy(update={"algorithm": algorithm.model_copy(update=found)})


def _load(place: str, what: str) -> None:
    try:
        if place.endswith(".py"):
            _load_file(Path(place).resolve())
        else:
            importlib.import_module(place)
    except Exception as error:
        raise ValueError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> None:
    _forget(path)
    before = _all_registered()
    try:
        load_file(path, "sextet_algorithm_")
    finally:
        _registered[path] = _all_registered() - before


def _registries() -> dict[str, Registry[Any, Any, Any]]:
    return {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES}


def _all_registered() -> set[tuple[str, str]]:
    return {(kind, name) for kind, registry in _registries().items() for name in registry}


def _forget(path: Path) -> None:
    for kind, name in _registered.pop(path, ()):
        registry = _registries()[kind]
        del registry[name], registry.defaults[name]
        if kind == "advantage":
            GROUPED_ADVANTAGES.discard(name)
