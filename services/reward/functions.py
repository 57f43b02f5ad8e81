"""A user's reward function: found by name, called by its signature, its answer checked. Standard library only."""

import asyncio
import contextlib
import difflib
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.userfile import load_file

VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_PARAMETERS = ("prompts", "completions")
MAX_ERROR_CHARACTERS = 500
MAX_PARTS = 64

Item = Mapping[str, Any]
Result = dict[str, Any]


class UnusableFunction(Exception):
    """The configured function cannot grade; the text names the key, the value and near names."""


class RewardFunction:
    """A function with verl's or TRL's signature, called with what its parameters ask for; it may be async.

    verl: `compute_score(data_source, solution_str, ground_truth, extra_info)` grades one response with a number or
    a dict of numbers with "score". TRL: `f(prompts, completions, **columns)` grades a list; columns are data_source,
    ground_truth, extra_info and the keys of extra_info, and chat prompts come with chat completions.
    """

    def __init__(self, spec: str, kwargs: dict[str, Any], runner: asyncio.Runner) -> None:
        self._function = load_function(spec)
        self._kwargs = kwargs
        self._runner = runner
        parameters = inspect.signature(self._function).parameters.values()
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = [p.name for p in named]
        self.signature = self._recognise(spec)
        self._check(spec, {p.name for p in named if p.default is p.empty})

    def grade(self, items: Sequence[Item]) -> Result:
        """`{"results": [...]}` with one per item, or `{"kind", "error"}` when a batch function failed as a whole."""
        if self.signature == "verl":
            return {"results": [self._grade_one(item) for item in items]}
        try:
            scores = list(self._call(_trl_arguments(items)))
        except BaseException as error:  # noqa: BLE001 - whatever a grader raises, SystemExit too, costs samples only
            return {"kind": "raised", "error": describe(error)}
        if len(scores) != len(items):
            return {"kind": "shape", "error": f"{len(scores)} scores for {len(items)} completions"}
        return {"results": [result(score) for score in scores]}

    def _grade_one(self, item: Item) -> Result:
        values = (item["data_source"], item["response"], item["ground_truth"], item["extra_info"])
        try:
            return result(self._call(dict(zip(VERL_PARAMETERS, values, strict=True))))
        except BaseException as error:  # noqa: BLE001 - as above
            return {"kind": "raised", "error": describe(error)}

    def _call(self, arguments: dict[str, Any]) -> Any:
        wanted = arguments if self._takes_any else {name: arguments[name] for name in self._names if name in arguments}
        answer = self._function(**(wanted | self._kwargs))
        return self._runner.run(_awaited(answer)) if inspect.isawaitable(answer) else answer

    def _recognise(self, spec: str) -> str:
        if "completions" in self._names:
            return "trl"
        if "solution_str" in self._names:
            return "verl"
        raise UnusableFunction(
            f"reward.function={spec!r} takes ({', '.join(self._names)}); it must take verl's "
            f"({', '.join(VERL_PARAMETERS)}) or TRL's ({', '.join(TRL_PARAMETERS)}, **columns)"
        )

    def _check(self, spec: str, required: set[str]) -> None:
        unknown = [] if self._takes_any else [key for key in self._kwargs if key not in self._names]
        if unknown:
            hint = nearest(unknown[0], self._names)
            raise UnusableFunction(f"reward.kwargs.{unknown[0]}: {spec} has no such parameter{hint}")
        missing = sorted(required - set(VERL_PARAMETERS) - set(self._kwargs))
        if self.signature == "verl" and missing:
            raise UnusableFunction(f"reward.function={spec!r} also needs {missing}: set reward.kwargs.{missing[0]}")


def load_function(spec: str) -> Callable[..., Any]:
    """The function that `module:name` or `path/file.py:name` names."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UnusableFunction(f"reward.function={spec!r} must be module:name or path/file.py:name")
    try:
        module = _load_file(spec, Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except UnusableFunction:
        raise
    except BaseException as error:
        raise UnusableFunction(f"reward.function={spec!r} cannot be imported: {describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnusableFunction(f"reward.function={spec!r}: {place} has no function {name!r}{nearest(name, names)}")
    return function


def _load_file(spec: str, path: Path) -> Any:
    if not path.is_file():
        near = nearest(path.name, sorted(p.name for p in path.parent.glob("*.py")))
        raise UnusableFunction(f"reward.function={spec!r}: there is no file {path} (from {Path.cwd()}){near}")
    # Last, not first, so that a file of the user's cannot hide a module of the standard library.
    sys.path.append(str(path.resolve().parent))
    return load_file(path, "sextet_reward_")


def result(answer: Any) -> Result:
    """What a function answered for one response, as it crosses the pipe; parts are the further numbers of a dict."""
    score, parts = (answer.get("score"), answer) if isinstance(answer, Mapping) else (answer, {})
    if isinstance(answer, Mapping) and "score" not in answer:
        return {"kind": "shape", "error": f'a dict without "score", with {[str(key)[:40] for key in list(answer)[:8]]}'}
    value = number(score)
    if value is None:
        return {"kind": "score", "error": f"the score {_shown(score)} is not a finite number"}
    numbers = {str(key)[:64]: number(part) for key, part in list(parts.items())[:MAX_PARTS] if key != "score"}
    return {"score": value, "parts": {key: part for key, part in numbers.items() if part is not None}}


def number(value: Any) -> float | None:
    """A finite float from an int, float, bool, or a numpy or torch scalar; None for anything else."""
    try:
        if not isinstance(value, int | float) and hasattr(value, "item"):
            value = value.item()
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except Exception:  # noqa: BLE001 - an int beyond float, or an object of the user's with an odd `item`
        return None


def describe(error: BaseException) -> str:
    """One line: type, text, and where in the user's code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = ""
    with contextlib.suppress(Exception):
        text = str(error)[:MAX_ERROR_CHARACTERS]
    return f"{type(error).__name__}: {text}{where}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint to end a message with, or nothing when nothing is known."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 3) or names[:8]
    return f"; near names: {', '.join(near)}" if near else ""


def _trl_arguments(items: Sequence[Item]) -> dict[str, list[Any]]:
    extras = [item["extra_info"] if isinstance(item["extra_info"], dict) else {} for item in items]
    keys = {key for extra in extras for key in extra if key.isidentifier()}
    columns = {key: [extra.get(key) for extra in extras] for key in sorted(keys)}
    fixed = {name: [item[name] for item in items] for name in ("data_source", "ground_truth", "extra_info")}
    prompts = [item["prompt"] for item in items]
    return columns | fixed | {"prompts": prompts, "completions": [_completion(item) for item in items]}


def _completion(item: Item) -> Any:
    chat = isinstance(item["prompt"], list)
    return [{"role": "assistant", "content": item["response"]}] if chat else item["response"]


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except Exception:  # noqa: BLE001 - a user's __repr__, or an int too long to print
        return f"of type {type(value).__name__}"


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
