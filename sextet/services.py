"""Services for a command: those that run, or ones started for it and ended after it; and detached ones."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from sextet.client import Client
from sextet.endpoint import STATE_DIR, LocalState, find_controller, read_state
from sextet.lastwords import last_words
from sextet.local import START_SECONDS, STOP_SECONDS, LocalError, LocalServices, already_up
from shared.rpc.errors import Unavailable


@contextlib.contextmanager
def services_for_run(
    replicas: Mapping[str, int], tell: Callable[[str], None], threads: int | None = None
) -> Iterator[Client]:
    """A client of the services that are up; with none up, of ones started here, which end with the block.

    Raises:
        LocalError: they can't be started, or one ended meanwhile.
    """
    with contextlib.ExitStack() as stack:
        try:
            endpoint, check = find_controller(), _check_up
        except Unavailable:
            local = stack.enter_context(LocalServices(replicas=replicas, threads=threads, tell=tell))
            endpoint, check = local.endpoint, local.check
        client = stack.enter_context(Client(endpoint))
        client.when_unavailable = check
        try:
            yield client
        except Unavailable:
            check()
            raise


def _check_up() -> None:
    if not os.environ.get("SEXTET_CONTROLLER") and read_state() is None:
        raise LocalError("the services of this directory have ended; `sextet up` takes unfinished runs up again")


def start_detached(arguments: Sequence[str], directory: Path = STATE_DIR) -> LocalState:
    """Runs `sextet up --foreground` in the background and waits until it is ready.

    Raises:
        LocalError: in its own words, when it ended.
    """
    if state := read_state(directory):
        raise LocalError(already_up(state.pid))
    log = directory / "logs" / "up.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "sextet", "up", "--foreground", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + START_SECONDS + 10
        while time.monotonic() < until:
            state = read_state(directory)
            if state and state.pid == process.pid and state.ready:
                return state
            if process.poll() is not None:
                raise LocalError(last_words(log).removeprefix("sextet: "), process.returncode)
            time.sleep(0.1)
        raise LocalError(f"the services did not become ready in time: {last_words(log)} (log: {log})")
    except BaseException:
        _terminate(process.pid)
        process.wait()
        raise


def keep_up(local: LocalServices) -> None:
    """Waits for Ctrl-C or SIGTERM. Raises LocalError when the controller ends, or Redis can't be started again."""
    while True:
        local.check()
        local.mend()
        time.sleep(0.5)


def stop_detached(directory: Path = STATE_DIR) -> bool:
    """Ends the services of this directory, in order; False when there are none."""
    state = read_state(directory)
    if state is None:
        return False
    _terminate(state.pid)
    return True


def _terminate(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS + 10)
        except psutil.TimeoutExpired:
            process.kill()
