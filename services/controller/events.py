"""What happened in a run, as a bounded stream in the store that can be followed from any point."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping

import structlog

from shared.gen.sextet.v1 import controller_pb2
from shared.rpc.errors import SextetError
from shared.state import StateStore

log = structlog.get_logger()
KEEP = 10_000
POLL_SECONDS = 0.25
AWAY_SECONDS = 5.0


def stream_key(run: str) -> str:
    return f"sextet:events:{run}"


class Events:
    """Writes a run's events. A store that is away costs events, never the run, and not its time either."""

    def __init__(self, store: StateStore, run: str) -> None:
        self._store, self._run = store, run
        self._away_until = 0.0

    async def send(self, kind: str, message: str, step: int = 0, metrics: Mapping[str, float] | None = None) -> None:
        """Appends an event; `kind` is state, step, call, validation, checkpoint, profile, recovery, warning, error."""
        log.info("event", run=self._run, step=step, kind=kind, message=message)
        fields = {
            "time": repr(time.time()),
            "kind": kind,
            "step": str(step),
            "message": message,
            "metrics": json.dumps(dict(metrics or {})),
        }
        if kind != "state" and time.monotonic() < self._away_until:
            return
        try:
            await self._store.append(stream_key(self._run), fields, KEEP)
        except SextetError as error:
            self._away_until = time.monotonic() + AWAY_SECONDS
            log.warning("event not stored", run=self._run, kind=kind, error=str(error))


async def follow(
    store: StateStore, run: str, after: str, over: Callable[[], bool]
) -> AsyncIterator[controller_pb2.RunEvent]:
    """Events after a cursor, old ones first; ends when the run is over and all are out."""
    while True:
        ended = over()
        try:
            # Waiting in the store would hold one of its few connections for each who watches.
            entries = await store.read(stream_key(run), after, 0.0)
        except SextetError:
            if ended:
                raise
            entries = []
        for cursor, fields in entries:
            after = cursor
            yield _event(cursor, fields)
        if not entries:
            if ended:
                return
            await asyncio.sleep(POLL_SECONDS)


def _event(cursor: str, fields: Mapping[str, str]) -> controller_pb2.RunEvent:
    return controller_pb2.RunEvent(
        cursor=cursor,
        time=float(fields["time"]),
        kind=fields["kind"],
        step=int(fields["step"]),
        message=fields["message"],
        metrics=json.loads(fields["metrics"]),
    )
