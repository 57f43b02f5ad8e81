"""What runs beside the gRPC face of a rollout: the watch on its engine, and the OpenAI face."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping

import psutil
import structlog

from services.rollout.openai.app import Face, make_app
from services.rollout.role import RolloutRole
from services.rollout.settings import RolloutSettings
from shared.http import serving
from shared.rpc.role import RoleServicer
from shared.rpc.run import RoleContext
from shared.rpc.server import EXIT_WEDGED
from shared.rpc.settings import split_address

log = structlog.get_logger()

RELEASE_SECONDS = 15.0
"""A dead engine that holds its memory and threads longer than that takes the process with it."""


@contextlib.asynccontextmanager
async def beside(
    context: RoleContext[RolloutSettings], role: RolloutRole, face: RoleServicer
) -> AsyncIterator[Mapping[str, str]]:
    """Meanwhile the engine is watched, and replaced when it is dead, and HTTP is served; see RoleParts.beside."""
    settings, store = context.settings, context.store
    app = make_app(Face(role, store, settings.replica), settings.token.get_secret_value())
    address = settings.http or f"{split_address(settings.bind)[0]}:0"
    face.on_release = role.kept.release
    watching = asyncio.create_task(role.watch.run(lambda: _replace(role, face)))
    try:
        async with serving(app, address, settings) as endpoint:
            yield {"openai": endpoint}
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _replace(role: RolloutRole, face: RoleServicer) -> None:
    """Lets go of the dead engine; who configures this replica again starts another one."""
    run = face.lose()
    try:
        await asyncio.wait_for(role.release(run), RELEASE_SECONDS)
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine is still there
        log.critical("the dead engine does not go: this process ends", error=f"{type(error).__name__}: {error}")
        _end_process()
    else:
        # Whoever did not wait for that has configured it again already, or is about to have.
        if face.standing == "dead":
            face.standing = "restarting"
        log.warning("the dead engine is gone; configured again, this replica starts another one", run=run)


def _end_process() -> None:
    """A thread that hangs in native code can't be stopped: whoever keeps this replica starts it again."""
    for child in psutil.Process().children(recursive=True):
        child.kill()
    sys.stderr.flush()
    os._exit(EXIT_WEDGED)
