"""Named places where a test can make a process fail.

`SEXTET_FAILPOINTS="training.step=kill,rollout.sample=sleep:5"`: these places act every time they are reached.
`SEXTET_FAILPOINTS=@DIR`: a file DIR/NAME that holds an action arms a place; who reaches it first takes the file away,
so that it strikes once, also in a process that is started again. NAME@ROLE arms a place in one role only.

Actions: `kill` (SIGKILL), `sleep:SECONDS`, `error`. Without the variable every place does nothing.
"""

import asyncio
import functools
import os
import signal
import time

VARIABLE = "SEXTET_FAILPOINTS"
STRUCK = ".struck"
"""What a file of DIR is renamed to, added to its name, when its place has acted."""
_process = {"role": ""}


class FailpointError(RuntimeError):
    """Raised by the action `error`."""


def in_role(role: str) -> None:
    """This process plays that role."""
    _process["role"] = role


def on() -> bool:
    """Whether any place may act."""
    return bool(os.environ.get(VARIABLE))


def hit(name: str) -> None:
    """Does what SEXTET_FAILPOINTS says about this place; blocks the thread when it is `sleep`."""
    if seconds := _act(name):
        time.sleep(seconds)


async def hit_async(name: str) -> None:
    """As `hit`, sleeping without blocking the event loop."""
    if seconds := _act(name):
        await asyncio.sleep(seconds)


def _act(name: str) -> float:
    if not (setting := os.environ.get(VARIABLE, "")):
        return 0.0
    names = (name, f"{name}@{_process['role']}")
    action, _, argument = (_armed(setting[1:], names) if setting[0] == "@" else _listed(setting, names)).partition(":")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "error":
        raise FailpointError(f"failpoint {name}")
    return float(argument) if action == "sleep" else 0.0


def _listed(setting: str, names: tuple[str, str]) -> str:
    actions = _parse(setting)
    return next((actions[name] for name in names if name in actions), "")


def _armed(directory: str, names: tuple[str, str]) -> str:
    for name in names:
        path = os.path.join(directory, name)
        try:
            # Of several processes one can rename it.
            os.rename(path, path + STRUCK)
        except FileNotFoundError:
            continue
        with open(path + STRUCK) as file:
            return next(iter(_parse(f"{name}={file.read().strip()}").values()))
    return ""


@functools.lru_cache(maxsize=8)
def _parse(text: str) -> dict[str, str]:
    parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    points = {name: action for name, _, action in parts}
    for name, action in points.items():
        if action not in ("kill", "error") and not _is_sleep(action):
            raise ValueError(f"{VARIABLE}: {name}={action}: use kill, sleep:SECONDS or error")
    return points


def _is_sleep(action: str) -> bool:
    kind, _, seconds = action.partition(":")
    return kind == "sleep" and seconds.replace(".", "", 1).isdigit()
