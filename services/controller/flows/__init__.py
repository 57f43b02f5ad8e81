"""Built-in flows by name, and users' own by `module:Class` or `path/to/file.py:Class`."""

import difflib
import importlib
import inspect
from pathlib import Path
from types import ModuleType

from services.controller.flows.async_ppo import AsyncPPO
from services.controller.flows.base import DataFlow
from services.controller.flows.dapo import DAPO
from services.controller.flows.grpo import GRPO
from services.controller.flows.ppo import PPO
from services.controller.flows.remax import ReMax
from shared.config import ConfigError
from shared.userfile import load_file

FLOWS: dict[str, type[DataFlow]] = {"ppo": PPO, "grpo": GRPO, "remax": ReMax, "dapo": DAPO, "async_ppo": AsyncPPO}


def load_flow(name: str) -> type[DataFlow]:
    """The flow of that name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name in FLOWS:
        return FLOWS[name]
    source, colon, attribute = name.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(name, FLOWS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known flows: {', '.join(FLOWS)}"
        raise ConfigError(f"flow: unknown flow {name!r}; {hint} Your own: module:Class or path/to/file.py:Class")
    return _flow_in(_module(source, name), attribute, name)


def _module(source: str, name: str) -> ModuleType:
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        path = Path(source)
        if not path.is_file():
            raise ConfigError(f"flow: {name!r}: file {source!r} does not exist (seen from {Path.cwd()})")
        return load_file(path, "sextet_flow_")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"flow: {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def _flow_in(module: ModuleType, attribute: str, name: str) -> type[DataFlow]:
    found = getattr(module, attribute, None)
    if inspect.isclass(found) and issubclass(found, DataFlow):
        return found
    flows = [
        key for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, DataFlow) and value is not DataFlow
    ]  # fmt: skip
    near = difflib.get_close_matches(attribute, flows, 1, 0.3)
    hint = f"did you mean {near[0]!r}?" if near else f"subclasses of DataFlow there: {', '.join(flows) or 'none'}"
    what = "is not a subclass of DataFlow" if found is not None else "is not there"
    raise ConfigError(f"flow: {name!r}: {attribute!r} {what}; {hint}")
