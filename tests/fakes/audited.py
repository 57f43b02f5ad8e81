"""A reward function under watch: whatever a response makes it execute is written down, and refused."""

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from shared.userfile import load_file

WATCHED = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "subprocess.Popen",
    "pty.spawn", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "urllib.Request", "compile",
    "exec", "import", "pickle.find_class", "marshal.loads", "ctypes.dlopen", "ctypes.dlsym", "shutil.rmtree",
    "os.remove", "os.rename", "os.truncate", "os.chmod", "os.symlink", "os.link", "os.mkdir", "os.putenv", "os.kill",
    "code.__new__", "sys.addaudithook", "builtins.input", "webbrowser.open",
)  # fmt: skip
PLAIN = ("1", "<answer>2</answer>", "")


class Refused(RuntimeError):
    """Something watched was about to happen."""


def _load(spec: str) -> Any:
    place, _, name = spec.rpartition(":")
    module = load_file(Path(place), "audited_") if place.endswith(".py") else importlib.import_module(place)
    return getattr(module, name)


class _Watch:
    """Armed after a harmless call: what a grader imports or compiles the first time is its own business."""

    def __init__(self) -> None:
        self.report = self.armed = ""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed or not (event in WATCHED or (event == "open" and _writes(arguments))):
            return
        report, self.armed = self.armed, ""
        descriptor = os.open(report, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        os.write(descriptor, f"{event} {arguments!r}"[:300].encode(errors="replace") + b"\n")
        os.close(descriptor)
        self.armed = report
        raise Refused(event)


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


_watch = _Watch()
_functions: dict[str, Any] = {}


def watched(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, function: str, report: str) -> Any:
    """verl's signature, over a function of that signature."""
    if function not in _functions:
        _functions[function] = _load(function)
        for text in PLAIN:
            with contextlib.suppress(Exception):
                _functions[function](data_source, text, ground_truth, extra_info)
    _watch.armed = report
    try:
        return _functions[function](data_source, solution_str, ground_truth, extra_info)
    finally:
        _watch.armed = ""


async def watched_batch(
    prompts: list[Any], completions: list[Any], ground_truth: list[str], function: str, report: str
) -> Any:
    """TRL's signature, asynchronous, over one of that kind."""
    if function not in _functions:
        _functions[function] = _load(function)
        await _functions[function](prompts=prompts, completions=["a"] * len(prompts), ground_truth=ground_truth)
    _watch.armed = report
    try:
        return await _functions[function](prompts=prompts, completions=completions, ground_truth=ground_truth)
    finally:
        _watch.armed = ""


def foolish(solution_str: str, ground_truth: str) -> float:
    """What the documentation says not to do."""
    return float(eval(solution_str) == eval(ground_truth))


def foolish_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return foolish(solution_str, ground_truth)


def every_task(solution_str: str, ground_truth: str, entries: str, grader: str, report: str) -> dict[str, float]:
    """One response to every reasoning-gym task with an entry in the JSON file `entries`: how many were graded."""
    import json

    tasks = _functions.get(entries) or _functions.setdefault(entries, json.loads(Path(entries).read_text()))
    grade, done = _functions.get(grader) or _functions.setdefault(grader, _load(grader)), 0
    for task, entry in tasks.items():
        arguments = (task, entry["answer"], {"source_dataset": task, "metadata": entry["metadata"]})
        if f"warm {task}" not in _functions:
            _functions[f"warm {task}"] = True
            _graded(grade, "1", *arguments)
            _graded(grade, f"<answer>{entry['answer']}</answer>", *arguments)
        _watch.armed = report
        try:
            done += _graded(grade, solution_str, *arguments)
        finally:
            _watch.armed = ""
    return {"score": 0.0, "graded": float(done)}


def _graded(grade: Any, text: str, task: str, answer: str, extra: Any) -> bool:
    try:
        grade(task, text, answer, extra)
    except Refused:
        raise
    except Exception:  # noqa: BLE001 - a scorer that raises has graded nothing
        return False
    return True
