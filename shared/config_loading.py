"""Reads configurations: files, mappings, JSON text and dotted overrides become one checked tree.

What is wrong is told with its key, its value and the nearest right one.
"""

import difflib
import json
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from shared.config import ConfigError, RunConfig, Section
from shared.presets import preset_of, preset_settings


def load_config(source: Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a configuration from a mapping, a YAML/JSON file, or JSON text, and applies dotted overrides.

    Args:
        source: the tree, a path, or JSON text (starts with `{`).
        overrides: `actor.optimizer.lr=1e-6` and the like; values are YAML scalars. `algorithm=rloo` chooses a preset,
            whose settings then win over the source's; other overrides win over both.

    Raises:
        ConfigError: naming the key, the value and the nearest known key.
    """
    tree = read_tree(source)
    given = [parse_override(override) for override in overrides]
    for key, value in sorted(given, key=lambda pair: not _names_preset(*pair)):
        if _names_preset(key, value):
            _choose_preset(tree, value)
        else:
            _assign(tree, key.split("."), value)
    _check_values(tree, "")
    _fill_in_preset(tree)
    _fill_in_correction(tree)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def parse_override(text: str) -> tuple[str, Any]:
    """Dotted key and value of `actor.optimizer.lr=1e-6`. Raises ConfigError."""
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"override {text!r} is not key=value")
    return key.strip(), _parse(value, f"override {text!r}")


def parse_config(text: str) -> RunConfig:
    """What arrives over a wire: one JSON object; never a path, nor YAML, whose parser takes minutes for megabytes.

    Raises:
        ConfigError: as load_config.
    """
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration is not a JSON object: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError("the configuration is not a JSON object")
    return load_config(tree)


def read_tree(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """A configuration's tree as it is written, unchecked; of a mapping: a copy. Raises ConfigError."""
    if isinstance(source, Mapping):
        try:
            return json.loads(json.dumps(source, default=_plain))
        except RecursionError:
            raise ConfigError("the configuration is nested too deeply") from None
    text = str(source)
    if not text.lstrip().startswith("{"):
        path = Path(text)
        if not path.is_file():
            raise ConfigError(f"configuration file {text!r} does not exist")
        text = path.read_text()
    tree = _parse(text, "the configuration")
    if not isinstance(tree, dict):
        raise ConfigError("the configuration must be a mapping of keys to values")
    return tree


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise ConfigError(f"a configuration holds plain values and paths, not {value!r}")


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-6 is a number (YAML 1.1 wants 1.0e-6) and a date is the text it is written as."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse(text: str, what: str) -> Any:
    if text.lstrip().startswith("{"):
        # JSON is not quite YAML: YAML refuses some characters and misreads escaped surrogate pairs.
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply") from None


def _check_values(value: Any, key: str) -> None:
    """What can't travel: JSON has neither infinity nor NaN, UTF-8 no halves of characters, messages 64 bits."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}: {value} is not a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key}: {value} does not fit into 64 bits")
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{key}: {value!r} holds half a character (a surrogate)")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        _check_values(inner, f"{key}.{name}".lstrip("."))


def _names_preset(key: str, value: Any) -> bool:
    return key == "algorithm.preset" or (key == "algorithm" and isinstance(value, str))


def _choose_preset(tree: dict[str, Any], name: str) -> None:
    if not isinstance(tree.get("algorithm"), dict):
        tree["algorithm"] = {}
    for key, value in {**_settings_of(name), "algorithm.preset": name}.items():
        _assign(tree, key.split("."), value)


def _fill_in_preset(tree: dict[str, Any]) -> None:
    name = preset_of(tree)
    if name is None:
        return
    if isinstance(tree["algorithm"], str):
        tree["algorithm"] = {"preset": name}
    for key, value in _settings_of(name).items():
        if not _has(tree, key.split(".")):
            _assign(tree, key.split("."), value)


def _fill_in_correction(tree: dict[str, Any]) -> None:
    """An older policy's samples are corrected for, unless the configuration says what else to do about them."""
    algorithm, rollout = tree.get("algorithm", {}), tree.get("rollout", {})
    if not (isinstance(algorithm, dict) and isinstance(rollout, dict)) or "correction" in algorithm:
        return
    if tree.get("flow") == "async_ppo" or rollout.get("budget"):
        tree["algorithm"] = {**algorithm, "correction": {"mode": "decoupled", "token_cap": 2.0}}


def _settings_of(name: str) -> dict[str, Any]:
    try:
        return preset_settings(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _has(tree: Any, keys: list[str]) -> bool:
    return not keys or (isinstance(tree, dict) and keys[0] in tree and _has(tree[keys[0]], keys[1:]))


def _assign(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {'.'.join(keys)}: {key} is a value, not a section")
        tree = child
    tree[keys[-1]] = value


def _explain(error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] != "extra_forbidden":
        shown = "" if isinstance(error["input"], dict) else f" (got {error['input']!r})"
        return f"{key or 'configuration'}: {error['msg'].removeprefix('Value error, ')}{shown}"
    section = _section_at(location[:-1])
    known = sorted(section.model_fields) if section else []
    near = difflib.get_close_matches(location[-1], known, 1)
    hint = f"did you mean {'.'.join([*location[:-1], near[0]])!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {key!r} (value {error['input']!r}); {hint}"


def _section_at(location: list[str]) -> type[Section] | None:
    section: type[Section] = RunConfig
    for key in location:
        annotation = section.model_fields[key].annotation
        choices = [annotation, *typing.get_args(annotation)]
        found = next((c for c in choices if isinstance(c, type) and issubclass(c, Section)), None)
        if found is None:
            return None
        section = found
    return section
