"""A run's configuration in the making: read and set by attribute; names are checked at once, values at the end."""

import difflib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.config import ConfigError, RunConfig, Section
from shared.config_loading import parse_override, read_tree


class UnknownKey(ConfigError, AttributeError):
    """A name that is no key of the configuration."""


class ConfigDraft:
    """The keys of RunConfig, nested: `draft.actor.optimizer.lr = 1e-6`.

    Reading a key that is not set gives its default. A section may be set as a mapping.

    Args:
        section: whose keys these are.
        values: what is set, nested; changed in place.
        key: the section's own key, for messages.
    """

    _section: type[Section]
    _values: dict[str, Any]
    _key: str

    def __init__(self, section: type[Section] = RunConfig, values: dict[str, Any] | None = None, key: str = "") -> None:
        vars(self).update(_section=section, _values={} if values is None else values, _key=key)

    @classmethod
    def of(cls, config: "ConfigDraft | RunConfig | Mapping[str, Any] | str | Path") -> "ConfigDraft":
        """A draft of its own, with what `config` sets."""
        if isinstance(config, ConfigDraft):
            return cls(values=read_tree(config._values))
        return cls(values=read_tree(config.model_dump(mode="json") if isinstance(config, RunConfig) else config))

    def update(self, settings: Mapping[str, Any]) -> None:
        """Sets keys, dotted or nested. Raises UnknownKey."""
        for name, value in settings.items():
            first, _, rest = name.partition(".")
            inner = self._inner(first)
            if rest and inner is None:
                raise UnknownKey(f"unknown key {self._path(name)!r}: {self._path(first)} is a value, not a section")
            if inner is not None and (rest or isinstance(value, Mapping)):
                self._draft(first, inner).update({rest: value} if rest else value)
            else:
                self._values[first] = value

    def apply(self, overrides: Sequence[str]) -> None:
        """Sets keys as on the command line: `actor.optimizer.lr=1e-6`. Raises ConfigError."""
        for override in overrides:
            self.update(dict([parse_override(override)]))

    def tree(self) -> dict[str, Any]:
        """A copy, nested. A run that has no length trains for one epoch."""
        tree = read_tree(self._values)
        if self._section is RunConfig and tree.get("total_steps") is None and tree.get("total_epochs") is None:
            tree["total_epochs"] = 1
        return tree

    def __getattr__(self, name: str) -> Any:
        inner = self._inner(name)
        field = self._section.model_fields[name]
        if name not in self._values and not field.is_required() and field.get_default() is None:
            return None
        if inner is not None:
            return self._draft(name, inner)
        if name not in self._values and field.is_required():
            raise ConfigError(f"{self._path(name)} is not set")
        return self._values.get(name, field.get_default())

    def __setattr__(self, name: str, value: Any) -> None:
        self._values.pop(name, None)
        self.update({name: value})

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._section.model_fields]

    def __repr__(self) -> str:
        return f"ConfigDraft({self._values})"

    def _draft(self, name: str, section: type[Section]) -> "ConfigDraft":
        values = self._values.setdefault(name, {})
        if not isinstance(values, dict):
            # `algorithm: dapo` names a preset.
            values = self._values[name] = {"preset": values} if name == "algorithm" else {}
        return ConfigDraft(section, values, self._path(name))

    def _inner(self, name: str) -> type[Section] | None:
        """The section under a key; None for a value."""
        known = self._section.model_fields
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {self._path(near[0])!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise UnknownKey(f"unknown key {self._path(name)!r}; {hint}")
        annotation = known[name].annotation
        choices = [annotation, *typing.get_args(annotation)]
        return next((c for c in choices if isinstance(c, type) and issubclass(c, Section)), None)

    def _path(self, name: str) -> str:
        return f"{self._key}.{name}".lstrip(".")
