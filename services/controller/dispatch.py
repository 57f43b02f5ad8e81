"""How the calls of one step reach replicas: rows are split, dead replicas' rows move on, lost blocks are made again."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from services.controller.calls import Result
from services.controller.cluster import Cluster, Session, StateLost
from services.controller.metrics import combine
from services.controller.profiles import Profiles
from services.controller.prompts import Prompt, spread_prompts
from services.controller.replica import Member, ReplicaLost, operate
from services.controller.stock import Sampled
from services.controller.verbs import GENERATE, KEPT, SPREAD, Verb
from shared.batch.columns import RowKey
from shared.batch.refs import keys_of, merge, row_keys, select_rows, split_by_tokens
from shared.gen.sextet.v1 import batch_pb2, rollout_pb2
from shared.rpc.errors import BatchLost, FailedPrecondition, InvalidArgument, SextetError, Unavailable

T = TypeVar("T")
BlockKey = tuple[str, str]
Report = Callable[[str, Mapping[str, float]], Awaitable[None]]


class StepChanged(Exception):
    """Samples made again differ from the lost ones, so that what was derived from them is void: play the step again."""


@dataclass(frozen=True)
class Share:
    """Work that may be given to one replica: prompts to sample, or rows by reference.

    Attributes:
        earlier: rows of the prompts that are gone on with.
        budget: response tokens that a row may grow by; 0: as many as it needs.
        since: the oldest version of samples that an earlier step left on disk.
    """

    prompts: tuple[Prompt, ...] = ()
    ref: batch_pb2.BatchRef | None = None
    greedy: bool = False
    validation: bool = False
    earlier: batch_pb2.BatchRef | None = None
    budget: int = 0
    since: int = 0

    def split(self, members: Sequence[Member], speeds: Mapping[str, float]) -> list[tuple[Member, "Share"]]:
        """Shares for at most these replicas: prompts by speed and load, rows by tokens, the heaviest to the first."""
        if self.ref is None:
            loads = {member.info.replica: member.load for member in members}
            parts = spread_prompts(self.prompts, {name: speeds[name] for name in loads}, loads)
            shares = {name: replace(self, prompts=tuple(part)) for name, part in parts.items()}
            return [(each, shares[each.info.replica]) for each in members if each.info.replica in shares]
        rows = [Share(ref=part) for part in split_by_tokens(self.ref, len(members))]
        return list(zip(members, sorted(rows, key=lambda share: -share.weight), strict=False))

    @property
    def weight(self) -> int:
        """Expected load: samples, or tokens."""
        if self.ref is None:
            return sum(len(prompt.samples) for prompt in self.prompts)
        return sum(max(block.tokens) if block.tokens else 0 for block in self.ref.blocks)


@dataclass(frozen=True)
class Made:
    """How a block was made, so that it can be made again."""

    verb: Verb
    share: Share
    block: batch_pb2.BlockRef
    member: Member


class Dispatcher:
    """Performs the calls of one step.

    Args:
        report: told about every recovery, in a sentence and numbers.
        before_mutation: awaited with the request before a role's state is changed.
        profiles: has calls recorded for those who asked for it.
    """

    def __init__(
        self,
        cluster: Cluster,
        session: Session,
        report: Report,
        before_mutation: Callable[[Verb, Any], Awaitable[None]],
        profiles: Profiles,
    ) -> None:
        self._cluster, self._session, self._profiles = cluster, session, profiles
        self._policy = session.config.recovery
        self._report, self._before_mutation = report, before_mutation
        self._made: dict[BlockKey, Made] = {}
        self._instead: dict[BlockKey, batch_pb2.BlockRef] = {}
        self._again: dict[BlockKey, int] = defaultdict(int)
        self._changes: Counter[str] = Counter()
        self._locks: dict[BlockKey, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def generate(self, prompts: Sequence[Prompt], *, greedy: bool = False, validation: bool = False) -> Result:
        """Samples the prompts, those of the validation dataset if asked, on all ready rollouts."""
        return await self._spread(GENERATE, Share(tuple(prompts), greedy=greedy, validation=validation))

    async def go_on(
        self, prompts: Sequence[Prompt], earlier: batch_pb2.BatchRef, budget: int, since: int
    ) -> tuple[Result, dict[RowKey, Sampled]]:
        """Samples the prompts, from where `earlier` left their rows and within the budget; and how far each row is."""
        share = Share(tuple(prompts), earlier=earlier, budget=budget, since=since)
        responses = await self._place(GENERATE, share, ())
        rows = {
            key: Sampled(oldest, place not in response.cut)
            for response in responses
            for place, (key, oldest) in enumerate(zip(keys_of(response.block.rows), response.oldest, strict=True))
        }
        return Result(GENERATE.name, _made_ref(responses), combine(responses)), rows

    async def perform(self, verb: Verb, *refs: batch_pb2.BatchRef) -> Result:
        """A call that takes rows by reference."""
        ref = merge(*refs)
        if not ref.blocks:
            raise InvalidArgument("called without rows")
        if verb.role in SPREAD:
            return await self._spread(verb, Share(ref=ref))
        response = await self._on_holder(verb, Share(ref=ref))
        metrics = dict(response.metrics)
        if hasattr(response, "version"):
            metrics["version"] = self._session.versions[verb.role] = response.version
        return Result(verb.name, _made_ref([response]), metrics)

    async def operate_kept(self, verb: Verb, request: Any, mark: str = "") -> Any:
        """An operation of the role that holds state, on whichever channel it is reachable; see `Cluster.hold`.

        Args:
            mark: sets it apart from the same request before.
        """
        # The same question before and after an update is not the same work.
        changes = self._changes[verb.role]
        self._session.identify(request, verb, mark or (f"after{changes}" if changes else ""))
        if verb.mutates:
            self._changes[verb.role] += 1
            if verb.role in self._session.versions:
                request.base_version = self._session.versions[verb.role]
            await self._before_mutation(verb, request)
        for _ in range(1 + self._policy.max_retries):
            member = await self._cluster.hold(self._session, verb.role)
            try:
                return await self._operate(member, verb, request)
            except ReplicaLost:
                await self._cluster.pools[verb.role].lose(member)
        raise Unavailable(f"{verb.name}: {verb.role} was lost {1 + self._policy.max_retries} times")

    async def _operate(self, member: Member, verb: Verb, request: Any) -> Any:
        """As `operate`; tells a refusal of the work, which is for good, from a replica that is not what it was."""
        # Once the request has its id: the work is the same, recorded or not.
        self._profiles.mark(verb, request)
        try:
            response = await operate(member, verb, request, self._policy)
        except FailedPrecondition as error:
            if type(error) is FailedPrecondition and (trouble := await member.trouble_with(self._session.run)):
                raise Unavailable(f"{error} ({member} {trouble})") from error
            raise
        self._profiles.take(verb, member, request, response)
        return response

    async def _on_holder(self, verb: Verb, share: Share) -> Any:
        for _ in range(1 + self._policy.max_retries):
            try:
                response = await self.operate_kept(verb, self._request(verb, share))
            except BatchLost as lost:
                await self._make_again(lost)
            else:
                if hasattr(response, "block"):
                    self._remember(verb, share, response.block, self._session.kept[verb.role])
                return response
        raise Unavailable(f"{verb.name}: its inputs were lost {1 + self._policy.max_retries} times")

    async def _spread(self, verb: Verb, share: Share) -> Result:
        responses = await self._place(verb, share, ())
        scores = [score for response in responses for score in getattr(response, "scores", ())]
        return Result(verb.name, _made_ref(responses), combine(responses), tuple(scores))

    async def _place(self, verb: Verb, share: Share, had: tuple[Member, ...]) -> list[Any]:
        """Splits a share over the ready replicas, if there are others than those that `had` it before."""
        if len(had) > self._policy.max_retries:
            lost = f"the same rows lost {len(had)} replicas{had[-1].said}"
            raise Unavailable(f"{verb.name}: {lost}; see the logs of {verb.role}")
        ready = await self._ready(verb, self._policy.replica_timeout)
        # The registry may not know yet what is wrong with them.
        members = [member for member in ready if member not in had] or ready
        speeds = self._cluster.pools[verb.role].speeds.of([member.info.replica for member in members])
        parts = share.split(members, speeds)
        responses = await gather(self._on_replica(verb, part, member, had) for member, part in parts)
        return [response for group in responses for response in group]

    async def _ready(self, verb: Verb, patience: float) -> list[Member]:
        """Replicas that may be given work; one that wants weights of an actor that was lost will never be."""
        return await self._cluster.unless_lost(self._session, self._cluster.pools[verb.role].wait(1, patience))

    async def _on_replica(self, verb: Verb, share: Share, member: Member, had: tuple[Member, ...]) -> list[Any]:
        started = time.monotonic()
        member.load += share.weight
        try:
            for _ in range(1 + self._policy.max_retries):
                request = self._session.identify(self._request(verb, share), verb)
                try:
                    response = await self._operate(member, verb, request)
                except BatchLost as error:
                    await self._make_again(error)
                else:
                    self._remember(verb, share, response.block, member)
                    # Its own seconds: an answer from memory takes none.
                    tokens, seconds = (response.metrics.get(name, 0) for name in ("response_tokens", "seconds"))
                    self._cluster.pools[verb.role].speeds.saw(member.info.replica, tokens, seconds)
                    return [response]
            raise Unavailable(f"{verb.name}: its inputs were lost {1 + self._policy.max_retries} times")
        except ReplicaLost:
            pool = self._cluster.pools[verb.role]
            await pool.lose(member)
            waits = f"its share waits until a {verb.role} is ready again: there is no other now"
            then = "its share goes to the others" if pool.ready() else waits
            await self._report(f"{member} was lost during {verb.name}{member.said}: {then}", _cost(share, started))
            return await self._place(verb, share, (*had, member))
        except SextetError as error:
            others = [other for other in self._cluster.pools[verb.role].ready() if other is not member]
            if not error.retryable or not others:
                raise
            then = "its share goes to the others"
            await self._report(f"{member} does not do {verb.name} ({error}): {then}", _cost(share, started))
            return await self._place(verb, share, (*had, member))
        finally:
            member.load -= share.weight

    def _request(self, verb: Verb, share: Share) -> Any:
        if share.ref is None:
            return self._generate_request(share)
        return verb.request(inputs=self._current(share.ref))

    def _generate_request(self, share: Share) -> rollout_pb2.GenerateRequest:
        request = rollout_pb2.GenerateRequest(
            prompts=[prompt.message() for prompt in share.prompts],
            greedy=share.greedy,
            validation=share.validation,
            budget=share.budget,
            since=share.since,
        )
        if share.earlier and share.earlier.blocks:
            wanted = {RowKey(prompt.uid, sample) for prompt in share.prompts for sample in prompt.samples}
            rows = [key for key in row_keys(share.earlier) if key in wanted]
            if rows:
                request.earlier.CopyFrom(self._current(select_rows(share.earlier, rows)))
        return request

    def _remember(self, verb: Verb, share: Share, block: batch_pb2.BlockRef, member: Member) -> None:
        self._made[(block.endpoint, block.block)] = Made(verb, share, block, member)

    def _current(self, ref: batch_pb2.BatchRef) -> batch_pb2.BatchRef:
        """The ref with blocks that were made again in place of the lost ones."""
        current = batch_pb2.BatchRef()
        for block in ref.blocks:
            latest = block
            while (key := (latest.endpoint, latest.block)) in self._instead:
                latest = self._instead[key]
            if latest is block:
                current.blocks.append(block)
            else:
                current.MergeFrom(select_rows(latest, keys_of(block.rows)))
        return current

    async def _make_again(self, lost: BatchLost) -> None:
        """Repeats the call that made a lost block, for exactly its rows; consumers then ask with `_current`."""
        key = lost.details.get("endpoint", ""), lost.details.get("block", "")
        async with self._locks[key]:
            if key in self._instead:
                return
            made = self._made.get(key)
            if made is None:
                raise lost
            if made.verb.role in KEPT and made.member.gone.is_set():
                raise StateLost(f"{made.member} was lost, and {made.verb.name}'s rows with it")
            self._again[key] += 1
            started = time.monotonic()
            block = await self._repeat(made, self._again[key])
            if made.verb is GENERATE and block.digest != made.block.digest:
                raise StepChanged(f"samples of {made.member} were lost, and made again they differ")
            self._instead[key] = block
            numbers = {"seconds": time.monotonic() - started, "lost_rows": len(made.block.rows)}
            await self._report(f"rows that {made.verb.name} had left on {made.member} were lost, made again", numbers)

    async def _who_repeats(self, made: Made) -> Member:
        """Another replica; for samples that no other would make, the one whose disk has them, once it is back."""
        pool, patience = self._cluster.pools[made.verb.role], self._policy.replica_timeout
        if made.verb is GENERATE and self._session.facts["rollout"].get("batch_invariant") == "false":
            if member := await pool.named(made.member.info.replica, patience):
                return member
            text = f"{made.member} does not come back: others make its samples again"
            await self._report(text, {"seconds": patience, "lost_rows": len(made.block.rows)})
        members = await self._ready(made.verb, patience)
        return next((each for each in members if each.info.endpoint != made.block.endpoint), members[0])

    async def _repeat(self, made: Made, again: int) -> batch_pb2.BlockRef:
        pool = self._cluster.pools[made.verb.role]
        for _ in range(1 + self._policy.max_retries):
            member = await self._who_repeats(made)
            request = self._session.identify(self._request(made.verb, made.share), made.verb, f"again{again}")
            try:
                response = await self._operate(member, made.verb, request)
            except ReplicaLost:
                await pool.lose(member)
            except BatchLost as lost:
                await self._make_again(lost)
            else:
                self._remember(made.verb, made.share, response.block, member)
                return response.block
        raise Unavailable(f"{made.verb.name}: lost rows could not be made again")


def _cost(share: Share, started: float) -> dict[str, float]:
    """What a lost attempt cost: rows or tokens that are computed again, and the time it had taken."""
    return {"lost_load": share.weight, "lost_seconds": time.monotonic() - started}


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _made_ref(responses: Sequence[Any]) -> batch_pb2.BatchRef | None:
    blocks = [response.block for response in responses if hasattr(response, "block")]
    return batch_pb2.BatchRef(blocks=blocks) if blocks else None
