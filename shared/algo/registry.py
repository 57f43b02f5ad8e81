"""Functions by name, each with further numbers of its own that are checked by name."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from functools import wraps
from typing import Any, Generic, TypeVar

Inputs = TypeVar("Inputs")
Options = TypeVar("Options")
Result = TypeVar("Result")


class Registry(dict[str, Callable[[Inputs, Options], Result]], Generic[Inputs, Options, Result]):
    """name -> function(inputs, options). `options.extra` holds the numbers a function declares at registration."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.defaults: dict[str, Mapping[str, float]] = {}

    def register(
        self, name: str, **defaults: float
    ) -> Callable[[Callable[[Inputs, Options], Result]], Callable[[Inputs, Options], Result]]:
        """A decorator that enters a function as `name`; `defaults` are the further numbers it reads.

        A name that ends in `*` allows any number whose name begins so.

        Raises:
            ValueError: the name is taken.
        """
        if name in self:
            raise ValueError(f"{self.kind} {name!r} is already registered")

        def enter(function: Callable[[Inputs, Options], Result]) -> Callable[[Inputs, Options], Result]:
            @wraps(function)
            def with_defaults(inputs: Inputs, options: Options) -> Result:
                given: Any = options
                self.check(name, given.extra)
                return function(inputs, replace(given, extra={**defaults, **given.extra}))

            self[name] = with_defaults
            self.defaults[name] = defaults
            return function

        return enter

    def find(self, name: str) -> Callable[[Inputs, Options], Result]:
        """The function registered as `name`.

        Raises:
            ValueError: unknown name; says the nearest known one.
        """
        if name not in self:
            raise ValueError(f"unknown {self.kind} {name!r}; {nearest(name, self)}")
        return self[name]

    def check(self, name: str, extra: Mapping[str, float]) -> None:
        """Raises ValueError when `extra` has a number that the function `name` does not read."""
        self.find(name)
        known = self.defaults[name]
        for key, value in extra.items():
            if not any(fnmatch(key, pattern) for pattern in known):
                hint = nearest(key, known) if known else "it reads none"
                raise ValueError(f"{self.kind} {name!r} does not read option {key!r} (value {value!r}); {hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: the nearest known name, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
