"""A child that ends with its parent: nothing the local launcher starts is left behind, however the launcher ends.

`python -m shared.rpc.lifetime PROGRAM ARG...` turns into that program, tied to the process that started it.
"""

import asyncio
import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "SEXTET_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def tie_to_parent() -> None:
    """Asks Linux for SIGTERM when the parent dies, if SEXTET_PARENT_PID is set; exits when it is dead already.

    The kernel watches the parent's *thread*: start services from a thread that lives as long as they shall.
    """
    if not (wanted := os.environ.get(PARENT_VARIABLE)):
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(wanted):
        sys.exit(f"the parent {PARENT_VARIABLE}={wanted} is gone (my parent is {os.getppid()})")


def orphaned() -> bool:
    """The parent in SEXTET_PARENT_PID is gone."""
    wanted = os.environ.get(PARENT_VARIABLE)
    return bool(wanted) and os.getppid() != int(wanted or 0)


async def wait_until_orphaned(interval: float = 0.5) -> None:
    """Returns when the parent is gone; for systems without prctl and signals that were missed."""
    while not orphaned():  # noqa: ASYNC110 - nothing in this process sets an event when another one dies
        await asyncio.sleep(interval)


if __name__ == "__main__":
    tie_to_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
