"""A user's Python file, named in a configuration, as a module: what the file says now, not what it said before."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


class _Source(SourceFileLoader):
    """Compiles anew: cached bytecode counts as current for a second when a change keeps the file's size."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load_file(path: Path, prefix: str) -> ModuleType:
    """Runs a file as module `prefix + its name`; whatever it raises, this raises.

    Raises:
        FileNotFoundError: there is none.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"{prefix}{path.stem}"
    spec = importlib.util.spec_from_loader(name, _Source(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of its own look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
