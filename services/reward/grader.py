"""A process that runs a user's reward function: `python -m services.reward.grader`.

JSON lines come in on stdin and go out on what was stdout; user code sees /dev/null and stderr in their place. The
first line is `{"function", "kwargs", "memory_bytes", "seconds"}`, answered by `{"signature"}` or `{"error"}`; each
further line is `{"id", "seconds", "items": [{data_source, prompt, response, ground_truth, extra_info}]}`, answered by
`{"id"}` with what `RewardFunction.grade` returns. Imports nothing heavy: a killed grader is back in a moment.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
from collections.abc import Callable
from typing import Any, BinaryIO

from services.reward.functions import RewardFunction, UnusableFunction

PR_SET_NO_NEW_PRIVS = 38
MAX_FILES = 1024


def main() -> None:
    with contextlib.suppress(PermissionError):  # already the leader of a session, as the service starts it
        os.setsid()
    requests, answer = _take_over_pipes()
    _spawn_watchdog()
    with asyncio.Runner() as runner:
        setup = json.loads(requests.readline())
        _give_up_privileges()
        _limit_memory(setup["memory_bytes"])
        _limit_processor(setup["seconds"])
        try:
            function = RewardFunction(setup["function"], setup["kwargs"], runner)
        except UnusableFunction as error:
            answer({"error": str(error)})
            return
        answer({"signature": function.signature})
        for line in requests:
            request = json.loads(line)
            _limit_processor(request["seconds"])
            answer({"id": request["id"]} | function.grade(request["items"]))


def _take_over_pipes() -> tuple[BinaryIO, Callable[[dict[str, Any]], None]]:
    """Moves the protocol off descriptors 0 and 1, out of reach of user code's input and prints."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    owner = os.getpid()
    # A forked copy must not hold the line open after the grader's death, nor answer in its name.
    os.register_at_fork(after_in_child=lambda: (answers.close(), requests.close()))

    def answer(message: dict[str, Any]) -> None:
        if os.getpid() != owner:
            os._exit(0)
        answers.write(json.dumps(message, allow_nan=False).encode() + b"\n")

    return requests, answer


def _spawn_watchdog() -> None:
    """Ends the process group when the service dies, even while user code holds the interpreter lock."""
    group = os.getpgrp()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():  # twice, so that user code waiting for "any child" never waits for the watchdog
        os._exit(0)
    poll = select.poll()
    poll.register(2, 0)
    poll.poll()  # returns when nobody can read stderr any more: the service is gone
    os.killpg(group, signal.SIGKILL)


def _give_up_privileges() -> None:
    """Nothing that user code starts gets more rights than it has: set-user-id programs run as anybody's."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _limit_memory(size: int) -> None:
    _limit_for_good(resource.RLIMIT_CORE, 0)
    _limit_for_good(resource.RLIMIT_NOFILE, MAX_FILES)
    if size:
        _limit_for_good(resource.RLIMIT_AS, size)


def _limit_processor(seconds: float) -> None:
    """Behind the service's own timeout; it also bounds what user code forked and left behind."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + seconds * (os.cpu_count() or 1)) + 2)


def _limit_for_good(what: int, most: int) -> None:
    """The hard limit, too: user code can't raise it again."""
    _, hard = resource.getrlimit(what)
    lower = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (lower, lower))


def _limit(what: int, most: int) -> None:
    """Lowers the soft limit; the hard one may be lower already, and cannot be raised again."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
