"""Plays one run from where it stands to its end: steps, commits, checkpoints, recoveries."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from services.controller import checkpoints
from services.controller.calls import CallFailed, Result, Scope
from services.controller.cluster import Cluster, Session, StateLost
from services.controller.dispatch import Dispatcher, StepChanged
from services.controller.events import Events
from services.controller.flows import load_flow
from services.controller.growth import Growth
from services.controller.journal import CannotWrite, Journal, MustWait, Position, encode_weights
from services.controller.pool import RoleMissing
from services.controller.profiles import Calls, Profiles
from services.controller.prompts import DatasetOrder, PromptSource
from services.controller.recovery import Establishment
from services.controller.replica import Refused, ReplicaLost, backoff
from services.controller.saver import Saver
from services.controller.step import Step
from services.controller.stock import Stock
from services.controller.summary import BOOKKEEPING, Summary, measure
from services.controller.telemetry import RECOVERIES
from services.controller.validation import Validation
from services.controller.verbs import ACTOR_UPDATE, CRITIC_UPDATE, EXPORT, Verb
from shared.config import RunConfig, dump_config
from shared.gen.sextet.v1 import actor_pb2
from shared.places import Place
from shared.rpc.errors import (
    AlreadyExists,
    BatchLost,
    FailedPrecondition,
    InvalidArgument,
    NotFinite,
    NotFound,
    PartlyApplied,
    PayloadMismatch,
    PermissionDenied,
    SextetError,
    StaleEpoch,
    Unauthenticated,
    Unimplemented,
    VersionGap,
)
from shared.state import StateStore

log = structlog.get_logger()

HOPELESS = (
    InvalidArgument,
    NotFound,
    AlreadyExists,
    FailedPrecondition,
    PermissionDenied,
    Unauthenticated,
    Unimplemented,
    RoleMissing,
)
"""Refusals: the same work would be refused again."""
NOT_HELD = (StateLost, PartlyApplied, PayloadMismatch, VersionGap)
"""After these the step in progress can't be finished."""
LEARNING = {ACTOR_UPDATE.name: "actor", CRITIC_UPDATE.name: "critic"}


class Deposed(Exception):
    """Another controller has taken over: this one must not touch the run any more."""


class Conductor:
    """One run in progress.

    Args:
        run: its id.
        directory: its directory.
        on_step: told where the run stands, of how many steps in all, and a committed step's metrics.
        confirm: whether this controller still leads; asked before it takes a new term.
    """

    def __init__(
        self,
        store: StateStore,
        cluster: Cluster,
        run: str,
        config: RunConfig,
        directory: Path,
        on_step: Callable[[int, int, dict[str, float] | None], Awaitable[None]],
        confirm: Callable[[], Awaitable[bool]],
    ) -> None:
        self.events = Events(store, run)
        self.pausing = asyncio.Event()
        self._store, self._cluster, self._run, self._config = store, cluster, run, config
        self._directory, self._on_step, self._confirm = directory, on_step, confirm
        self._journal = Journal.open(directory)
        self._flow = load_flow(config.flow)(config)
        self._roles = self._flow.roles(config)
        self._summary = Summary(directory)
        self._validation = Validation(directory, config.data)
        self._wanted: list[asyncio.Future[tuple[str, int]]] = []
        self._ended = False
        self._epoch = 0
        self._progress = 0.0
        root = checkpoints.root_of(config, run, directory)
        self._saver = Saver(root, config.checkpoint.keep, self._keep, self._tell_saved)
        self._profiles = Profiles(directory / "traces", partial(self.events.send, "profile"))
        self._doing = ("set-up", 0)
        self._released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._released.set_result(None)

    async def play(self) -> str:
        """Runs to the end, or to a pause; returns the run's new state, `done` or `paused`.

        Raises:
            CallFailed, SextetError, Refused: why the run cannot go on.
            MustWait: why the run has to wait; it is as it was, and can be played on.
            Deposed: another controller has the run.
        """
        try:
            return await self._play_on()
        except MustWait as error:
            self._answer_wanted(FailedPrecondition(str(error)))
            raise
        finally:
            self._ended = True
            self._answer_wanted(FailedPrecondition("the run has ended"))
            self._profiles.close()

    async def _play_on(self) -> str:
        cause, back, failures, reached = "", False, 0, -1
        while True:
            try:
                return await self._play(cause, back)
            except (CallFailed, StateLost, StepChanged, ReplicaLost, SextetError, Refused) as error:
                reason = error.cause if isinstance(error, CallFailed | Refused) else error
                if isinstance(reason, StaleEpoch):
                    raise Deposed(str(reason)) from error
                if isinstance(reason, MustWait):
                    raise reason from error
                # The same step gives the same numbers: people have to look at it.
                if isinstance(reason, NotFinite):
                    raise MustWait(str(error)) from error
                # Progress since the last failure: the count begins anew.
                failures = 1 if self._journal.position.step > reached else failures + 1
                reached, cause = self._journal.position.step, str(error)
                back = isinstance(reason, NOT_HELD) or failures > 1
                if isinstance(error, Refused) or not _passes(reason) or failures > self._config.recovery.max_retries:
                    raise
                doing, step = self._doing
                await self.events.send("warning", f"{doing} failed: {cause}", step)
                if failures > 1:
                    # What keeps failing needs time to end, or to come back.
                    await asyncio.sleep(backoff(self._config.recovery, failures))

    async def release(self) -> None:
        """Ends the run's hold on the roles."""
        await asyncio.gather(self._released, return_exceptions=True)
        epoch = max(self._epoch, self._journal.epoch)
        await self._cluster.unassign()
        await self._cluster.release_run(self._run, epoch, self._roles)

    def checkpoint(self) -> asyncio.Future[tuple[str, int]]:
        """Asks for a checkpoint after the step in progress; resolves to its directory and step."""
        future: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self._wanted.append(future)
        if self._ended:
            self._answer_wanted(FailedPrecondition("the run has ended"))
        return future

    def profile(self, role: str, steps: int) -> "asyncio.Future[Calls]":
        """Has a role's calls recorded in the next steps; resolves to what their ranks have seen.

        Raises:
            FailedPrecondition: the run does without the role; of the future: no trace was written.
        """
        if role not in self._roles:
            raise FailedPrecondition(f"run {self._run!r} has no {role}: its roles are {', '.join(sorted(self._roles))}")
        return self._profiles.ask(role, steps)

    def _answer_wanted(self, error: Exception) -> None:
        for future in self._wanted:
            if not future.done():
                future.set_exception(error)
        self._wanted = []

    async def _play(self, cause: str, back: bool) -> str:
        session = await self._establish(cause, back)
        rows = _rows(session, "dataset")
        total = self._total_steps(rows)
        await asyncio.to_thread(self._refuse_nothing_to_do, total)
        await self._on_step(self._journal.position.step, total, None)
        order = DatasetOrder(rows, self._config.seed, self._config.data.shuffle)
        position = self._journal.position.step
        await self._saver.look(position, 0 if session.attached else position)
        try:
            await self._play_steps(session, order, total)
        finally:
            self._wanted = [*await self._saver.abandon(), *self._wanted]
        if self._journal.position.step < total:
            return "paused"
        await self._finish(session)
        return "done"

    async def _play_steps(self, session: Session, order: DatasetOrder, total: int) -> None:
        """To the end or to a pause, and until what is there is saved."""
        # A run that goes on where the roles are may have been stopped before its checkpoint was there.
        unsaved = session.attached and self._journal.position.step > 0
        while True:
            done = self._journal.position.step
            if self._saver.ended:
                await self._saved()
            # Amid a step that is taken up again the roles are past `done`.
            between = not self._journal.issued
            if unsaved and between and self._due(done, total):
                await self._begin_save(session)
            if between and self._validation.due(done, total):
                await self._validate(session)
            if done >= total:
                break
            if between and self.pausing.is_set():
                await self._begin_save(session)
                break
            await self._step(session, done + 1, order, total)
            unsaved = True
        await self._saved()

    async def _establish(self, cause: str, back: bool) -> Session:
        before, started = self._journal.position.step, time.monotonic()
        self._doing = ("taking hold of the roles", before)
        # One that was frozen meanwhile would fence off the present leader.
        if not await self._confirm():
            raise Deposed("the lease on leading is another's")
        had_begun = self._journal.begun
        config_json = dump_config(self._config)
        warn = partial(self.events.send, "warning")
        establishment = Establishment(
            self._store, self._cluster, self._journal, self._config, self._directory, warn, cause
        )
        try:
            session = await establishment.run(self._run, config_json, self._roles, back=back)
        finally:
            # Also of an attempt that failed: what roles hold by it can be released with nothing less.
            self._epoch = establishment.epoch
        if had_begun:
            numbers = {
                "seconds": time.monotonic() - started,
                "lost_steps": before - self._journal.position.step,
                "lost_seconds": time.monotonic() - self._progress if self._progress else 0.0,
            }
            message = f"goes on from step {self._journal.position.step}: {cause or 'taken up again'}"
            RECOVERIES.inc()
            await self.events.send("recovery", message, self._journal.position.step, numbers)
        return session

    async def _step(self, session: Session, number: int, order: DatasetOrder, total: int) -> None:
        session.step, self._doing = number, (f"step {number}", number)
        position = self._journal.position
        session.versions = dict(position.versions)
        self._profiles.begin()
        source = PromptSource(order, self._config.rollout.n, position.position)

        async def before_mutation(verb: Verb, request: Any) -> None:
            # What a checkpoint in progress has not copied yet must not change.
            await self._saver.copied()
            await self._journal.issue(session.epoch, verb.name)

        started = time.monotonic()
        dispatcher = self._dispatcher(session, before_mutation)
        async with Scope() as scope:
            growth = self._growth(dispatcher, position)
            step = Step(number, scope, dispatcher, self._cluster, session, source, growth)
            drawn = growth.room(total - number + 1) if growth else self._config.data.batch_size
            handle = await self._flow.play(step, step.prompts(drawn))
        outcome = await handle
        seconds = time.monotonic() - started
        metrics = await asyncio.to_thread(self._summary.add, number, outcome, scope.results, seconds)
        versions = position.versions | {
            LEARNING[result.call]: int(result.metrics["version"]) for result in scope.results if result.call in LEARNING
        }
        stock = growth.after_update(versions["actor"]) if growth else {}
        committed = Position(number, source.position, versions, encode_weights(session.weights), stock)
        await self._journal.commit(session.epoch, committed)
        session.step, self._progress = number + 1, time.monotonic()
        await self._tell(number, total, metrics, scope.results)
        # Beside the next step: a replica that does not answer must not hold it up.
        await self._released
        # What waits for the next step is held by this one.
        step = number - bool(stock.get("waiting"))
        # Going back, prompts in flight find again what steps before the checkpoint finished of them.
        back = self._saver.oldest - (1 + self._config.algorithm.staleness if growth else 0)
        self._released = asyncio.create_task(self._cluster.release(session, step, back))

    def _growth(self, dispatcher: Dispatcher, position: Position) -> Growth | None:
        if not self._flow.carries(self._config):
            return None
        return Growth(dispatcher, Stock.decode(position.stock), self._config)

    async def _validate(self, session: Session) -> None:
        step = self._journal.position.step
        self._doing = (f"validation after step {step}", step)
        rows = _rows(session, "validation")
        metrics = await self._validation.measure(self._dispatcher(session, _nothing), rows, step)
        await self.events.send("validation", f"step {step} on {rows} validation prompts", step, metrics)

    async def _tell(self, number: int, total: int, metrics: dict[str, float], results: list[Result]) -> None:
        measure(metrics, results)
        for result in (result for result in results if result.call not in BOOKKEEPING):
            await self.events.send("call", result.call, number, {"seconds": result.seconds})
        await self.events.send("step", f"step {number} of {total}", number, metrics)
        await self._profiles.end()
        await self._on_step(number, total, metrics)

    def _dispatcher(self, session: Session, before_mutation: Callable[[Verb, Any], Awaitable[None]]) -> Dispatcher:
        async def report(message: str, numbers: Mapping[str, float]) -> None:
            RECOVERIES.inc()
            await self.events.send("recovery", message, session.step, numbers)

        return Dispatcher(self._cluster, session, report, before_mutation, self._profiles)

    def _total_steps(self, rows: int) -> int:
        if self._config.total_steps:
            return self._config.total_steps
        assert self._config.total_epochs
        return max(1, self._config.total_epochs * rows // self._config.data.batch_size)

    def _refuse_nothing_to_do(self, total: int) -> None:
        step = self._journal.position.step
        if step >= total and not self._summary.lines():
            raise InvalidArgument(past_the_end(self._config, step, total))

    def _due(self, step: int, total: int) -> bool:
        settings = self._config.checkpoint
        # One that was given up is made up for after the next step.
        late = step - self._saver.step >= settings.save_interval
        return bool(self._wanted) or (
            settings.auto_save and (step % settings.save_interval == 0 or step == total or late)
        )

    async def _begin_save(self, session: Session) -> None:
        position = self._journal.position
        self._doing = (f"checkpoint of step {position.step}", position.step)
        dispatcher = self._dispatcher(session, _nothing)
        await self._saver.begin(session, dispatcher, position, self._wanted)
        self._wanted = []

    async def _saved(self) -> None:
        self._doing = (f"checkpoint of step {self._saver.step}", self._saver.step)
        await self._saver.end()

    async def _tell_saved(self, directory: Place, step: int, numbers: dict[str, float]) -> None:
        await self.events.send("checkpoint", str(directory), step, numbers)

    async def _finish(self, session: Session) -> None:
        directory = self._directory / "model"

        async def export(attempt: int) -> None:
            request = actor_pb2.ExportModelRequest(directory=str(directory))
            await self._dispatcher(session, _nothing).operate_kept(EXPORT, request)

        async def summarize(attempt: int) -> None:
            await asyncio.to_thread(self._summary.write)

        if self._config.checkpoint.export:
            self._doing = ("export", self._journal.position.step)
            await self._keep("export", directory, export)
        await self._keep("summary", self._directory, summarize)

    async def _keep(self, what: str, path: Place | Path, write: Callable[[int], Awaitable[None]]) -> None:
        """Has something written, again after a failure. What the roles hold is never given up for it.

        Args:
            write: does it; given the attempt, counted from 0.

        Raises:
            CannotWrite: it failed `recovery.max_retries` times more.
        """
        policy, step = self._config.recovery, self._journal.position.step
        for attempt in itertools.count():
            try:
                await write(attempt)
            except (StaleEpoch, RoleMissing):
                raise
            except (SextetError, OSError) as error:
                if attempt >= policy.max_retries:
                    raise CannotWrite(what, path, error) from error
                await self.events.send("warning", f"{what} failed: {error}", step)
                await asyncio.sleep(backoff(policy, attempt + 1))
            else:
                return


def past_the_end(config: RunConfig, step: int, total: int) -> str:
    """What is wrong with a run whose checkpoint leaves it no step to play."""
    key, makes = ("total_steps", "is") if config.total_steps else (f"total_epochs={config.total_epochs}", "makes")
    there = f"resume_from={config.resume_from!r}: the checkpoint is at step {step}"
    return f"{there} but {key} {makes} {total}: raise {key.partition('=')[0]}"


def _rows(session: Session, which: str) -> int:
    rows, data = session.facts["rollout"].get(f"{which}_rows", ""), session.config.data
    if not rows.isdecimal() or rows == "0":
        key, path = ("path", data.path) if which == "dataset" else ("validation_path", data.validation_path)
        raise InvalidArgument(f"data.{key}={path!r} has no usable prompts ({which}_rows={rows!r})")
    return int(rows)


async def _nothing(verb: Verb, request: Any) -> None:
    return None


def _passes(reason: BaseException) -> bool:
    """Whether beginning again can help: state that was lost, replicas that come back; not what was refused for good."""
    if isinstance(reason, (*NOT_HELD, ReplicaLost, StepChanged, BatchLost)):
        return True
    return isinstance(reason, SextetError) and not isinstance(reason, HOPELESS)
