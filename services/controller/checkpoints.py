"""Checkpoints of a run: actor and critic side by side, and `run.json`, which makes them one."""

import asyncio
import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.controller import verbs
from services.controller.cluster import Session
from services.controller.dispatch import Dispatcher, gather
from services.controller.journal import Position
from services.controller.stock import Stock
from shared.config import RunConfig
from shared.failpoints import hit_async
from shared.gen.sextet.v1 import role_pb2
from shared.places import Local, Place, place
from shared.rpc.errors import DamagedCheckpoint, FailedPrecondition, StaleEpoch, Unavailable

MANIFEST = "run.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete one on disk."""

    directory: Place
    position: Position

    def of(self, role: str) -> str:
        """The role's own directory."""
        return str(self.directory / role)


def load(directory: Place) -> Checkpoint:
    """Reads a checkpoint's manifest.

    Raises:
        DamagedCheckpoint: the directory has no complete checkpoint; Unavailable: it can't be read now.
    """
    with _readable_now(directory / MANIFEST):
        try:
            content = json.loads((directory / MANIFEST).read())
            stock = Stock.decode(content.get("stock", {})).without_rows().encode()
            versions = {role: int(version) for role, version in content["versions"].items()}
            position = Position(int(content["step"]), int(content["position"]), versions, stock=stock)
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedCheckpoint(f"{directory} is no complete checkpoint: it has no {MANIFEST}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{directory / MANIFEST} is damaged: {error!r}") from None
    return Checkpoint(directory, position)


@contextlib.contextmanager
def _readable_now(what: Place) -> Iterator[None]:
    """Raises Unavailable where a disk or a store does not answer."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"{what} can't be read: {error}") from error


def root_of(config: RunConfig, run: str, directory: Path) -> Place:
    """Where a run's checkpoints go: into the run's directory, unless `checkpoint.directory` says otherwise.

    Raises:
        ValueError: it names no place.
    """
    return place(config.checkpoint.directory) / run if config.checkpoint.directory else Local(directory / "checkpoints")


def directories(root: Place) -> list[Place]:
    """The checkpoints under `root` that were written to their end, the newest first.

    Raises:
        Unavailable: it can't be read now.
    """
    with _readable_now(root):
        numbered = [(step, name) for name in root.children() if (step := step_of(name)) is not None]
    return [root / name for _, name in sorted(numbered, reverse=True) if is_complete(root / name)]


def readable(there: Iterable[Place]) -> list[Checkpoint]:
    """Those of the `directories` whose manifest can be read and is not damaged."""
    found = []
    for directory in there:
        with contextlib.suppress(DamagedCheckpoint, Unavailable):
            found.append(load(directory))
    return found


def step_of(name: str) -> int | None:
    """Of a checkpoint's directory; None: it is none."""
    number = name.removeprefix("step_")
    return int(number) if number.isdecimal() and number != name else None


def is_complete(directory: Place) -> bool:
    """Whether the directory is a whole checkpoint.

    Raises:
        Unavailable: it can't be read now.
    """
    with _readable_now(directory / MANIFEST):
        return (directory / MANIFEST).exists()


async def stage(session: Session, dispatcher: Dispatcher, position: Position, attempt: int) -> float:
    """Has the roles copy their state, which is at `position`; returns the seconds that the slowest took for it.

    Raises:
        FailedPrecondition: one is at another version.
    """
    roles, mark = sorted(session.kept), f"stage{session.epoch}.{attempt}"
    answers = await gather(
        dispatcher.operate_kept(verbs.stage(role), role_pb2.StageCheckpointRequest(), mark) for role in roles
    )
    for role, answer in zip(roles, answers, strict=True):
        if answer.version != position.versions[role]:
            raise FailedPrecondition(f"{role} is at {answer.version}, not at {position.versions[role]}: not saved")
    return max((answer.seconds for answer in answers), default=0.0)


async def save(
    directory: Place, session: Session, dispatcher: Dispatcher, position: Position, attempt: int, keep: int
) -> None:
    """Has the roles write what they copied, then writes the manifest, then removes all but the newest `keep`.

    An attempt that fails leaves nothing behind.

    Args:
        attempt: counted from 0 in a session. What an earlier one had written is gone, so that each is its own work.
    """
    if await asyncio.to_thread(is_complete, directory):
        return
    try:
        await _save_roles(directory, session, dispatcher, position, f"save{session.epoch}.{attempt}")
        await _write_manifest(directory, session, position)
    except StaleEpoch:
        # The directory may be the present leader's by now.
        raise
    except Exception:
        with contextlib.suppress(OSError, Unavailable):
            if not await asyncio.to_thread(is_complete, directory):
                await asyncio.to_thread(directory.remove)
        raise
    await hit_async("controller.after_checkpoint")
    await asyncio.to_thread(_remove_old, directory.parent, keep, position.step)


def _remove_old(root: Place, keep: int, newest: int) -> None:
    """All but `keep` up to the newest good one, and what was begun and given up before them.

    What is newer was refused, and does not count; or another controller is about to write it.
    """
    steps = [
        checkpoint.position.step for checkpoint in readable(directories(root)) if checkpoint.position.step <= newest
    ]
    oldest = min(steps[:keep], default=0)
    for name in root.children():
        step = step_of(name)
        if step is not None and step < oldest:
            # The manifest goes first: what is half removed is no checkpoint.
            with contextlib.suppress(OSError):
                (root / name / MANIFEST).remove()
                (root / name).remove()


async def _save_roles(
    directory: Place, session: Session, dispatcher: Dispatcher, position: Position, mark: str
) -> None:
    roles = sorted(session.kept)
    requests = [
        role_pb2.SaveCheckpointRequest(directory=str(directory / role), version=position.versions[role])
        for role in roles
    ]
    work = [
        dispatcher.operate_kept(verbs.checkpoint(role), request, mark)
        for role, request in zip(roles, requests, strict=True)
    ]
    # All come to their end, also after a failure: what is half written can only then be removed.
    outcomes: list[Any] = await asyncio.gather(*work, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def _write_manifest(directory: Place, session: Session, position: Position) -> None:
    content = {
        "step": position.step,
        "position": position.position,
        "versions": position.versions,
        "stock": position.stock,
        "run": session.run,
        "config": json.loads(session.config_json),
    }
    await hit_async("controller.before_checkpoint")
    await asyncio.to_thread((directory / MANIFEST).write, json.dumps(content, indent=1).encode())
