"""One step of a run as a flow sees it: calls by verb, weights, further prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.controller.calls import Handle, Result, Scope, Work
from services.controller.cluster import Cluster, Session
from services.controller.dispatch import Dispatcher, gather
from services.controller.growth import Growth
from services.controller.metrics import flatten, join_parts
from services.controller.prompts import Prompt, PromptSource, split_prompts
from services.controller.verbs import BY_ROW, PUBLISH_WEIGHTS, Verb
from shared.batch.refs import merge, row_keys, select_rows
from shared.gen.sextet.v1 import actor_pb2

After = Handle | Sequence[Handle] | None


class Step:
    """What `DataFlow` methods act on while `forward` runs.

    Attributes:
        number: counted from 1.
        taken: prompts handed out in this step.
        growth: the prompts in flight, in a run whose samples may wait for a later step.
    """

    def __init__(
        self,
        number: int,
        scope: Scope,
        dispatcher: Dispatcher,
        cluster: Cluster,
        session: Session,
        source: PromptSource,
        growth: Growth | None = None,
    ) -> None:
        self.number = number
        self.growth = growth
        self.taken = 0
        self._scope, self._dispatcher = scope, dispatcher
        self._cluster, self._session, self._source = cluster, session, source

    def prompts(self, count: int) -> list[Prompt]:
        """The next prompts of the dataset order."""
        taken, self.taken = self.taken, self.taken + count
        return self._source.take(self.number, count, taken)

    def generate(self, prompts: Sequence[Prompt], baseline: bool, after: After) -> Handle:
        """Samples of the prompts, in `rollout.pieces` parts: who takes them begins with the part that is done first.

        With `rollout.budget`: samples of a batch of prompts in flight, these among them.
        """
        if self.growth:
            return self._from_stock(self.growth, prompts, after)
        wanted = min(self._session.config.rollout.pieces, len(prompts))
        pieces = split_prompts(prompts, wanted) if wanted > 1 else [prompts]
        parts = [(self._sampling(piece, baseline), ()) for piece in pieces]
        return self._scope.start_parts("rollout.generate", parts, join_parts, _listed(after))

    def ready(self, prompts: Sequence[Prompt], after: After) -> Handle:
        """What an earlier step sampled ahead; in the first one: sampled now, of the first of these prompts."""
        growth = self._carried(prompts)

        async def work(_: list[Result]) -> Result:
            filled = await growth.fill()
            taken = growth.take()
            return replace(taken, metrics={**(filled.metrics if filled else {}), **taken.metrics})

        return self._scope.start("rollout.ready", work, (), _listed(after))

    def ahead(self, after: After) -> Handle:
        """Samples what the next step trains on; nothing in the last one."""
        growth = self._carried(())

        async def work(_: list[Result]) -> Result:
            if not growth.stock.waiting:
                return Result("rollout.generate")
            grown = await growth.grow(ahead=True)
            await growth.hold()
            return grown

        return self._scope.start("rollout.generate", work, (), _listed(after))

    def _from_stock(self, growth: Growth, prompts: Sequence[Prompt], after: After) -> Handle:
        self._carried(prompts)

        async def work(_: list[Result]) -> Result:
            grown = await growth.grow(ahead=False)
            taken = growth.take()
            await growth.hold()
            return Result("rollout.generate", taken.ref, {**grown.metrics, **taken.metrics})

        return self._scope.start("rollout.generate", work, (), _listed(after))

    def _carried(self, prompts: Sequence[Prompt]) -> Growth:
        if self.growth is None:
            raise RuntimeError("the flow's `carries` says that no prompts wait for a later step")
        self.growth.stock.admit(replace(prompt, step=self.number) for prompt in prompts)
        return self.growth

    def overlap(self, sampling: Handle, update: Handle) -> Handle:
        """Which share of the time of `sampling` the step trained in, up to the end of `update`."""

        async def work(results: list[Result]) -> Result:
            ahead, updated = results
            hidden = updated.began + updated.seconds - ahead.began
            share = min(1.0, max(0.0, hidden / ahead.seconds)) if ahead.metrics else 0.0
            return Result("overlap", metrics={"share": share, "seconds": share * ahead.seconds})

        return self._scope.start("overlap", work, (sampling, update))

    def _sampling(self, prompts: Sequence[Prompt], baseline: bool) -> Work:
        async def work(_: list[Result]) -> Result:
            if not baseline:
                return await self._dispatcher.generate(prompts)
            # The greedy row is the sample after the last: its key says what it is, wherever it travels.
            greedy = [Prompt(each.uid, each.index, (self._session.config.rollout.n,)) for each in prompts]
            sampling = self._dispatcher.generate(prompts), self._dispatcher.generate(greedy, greedy=True)
            # When one fails, the other must not outlive the step.
            sampled, best = await gather(sampling)
            assert sampled.ref is not None
            assert best.ref is not None
            sampled.ref.MergeFrom(best.ref)
            return sampled

        return work

    def call(self, verb: Verb, inputs: Sequence[Handle | None], after: After) -> Handle:
        """A call on the rows of its inputs; None stands for a column that the flow does without."""

        async def work(results: list[Result]) -> Result:
            return await self._dispatcher.perform(verb, *(result.ref for result in results if result.ref))

        if verb in BY_ROW and len(inputs) == 1 and inputs[0] and len(inputs[0].parts) > 1:
            parts = [(work, (part,)) for part in inputs[0].parts]
            return self._scope.start_parts(verb.name, parts, join_parts, _listed(after))
        return self._scope.start(verb.name, work, [handle for handle in inputs if handle], _listed(after))

    def sync_weights(self, after: After) -> Handle:
        """Publishes the actor's weights and brings them to every rollout."""
        return self._scope.start("sync_weights", lambda _: self.publish(), (), _listed(after))

    async def publish(self) -> Result:
        """The work of `sync_weights`."""
        request = actor_pb2.PublishWeightsRequest()
        published = await self._dispatcher.operate_kept(PUBLISH_WEIGHTS, request)
        received = await self._cluster.sync(self._session, published.weights)
        sizes = {"bytes": published.weights.bytes, "received_bytes": received}
        numbers = {"version": published.weights.version, **sizes}
        return Result("sync_weights", metrics=numbers)

    def warmup(self, critic: Handle) -> Handle:
        """Skipped, and with it what comes after, in the first `critic.warmup_steps` steps."""

        async def work(_: list[Result]) -> Result:
            return Result("warmup", skipped=self.number <= self._session.config.critic.warmup_steps)

        # Once the policy learns too, actor and critic have nothing to wait for from each other.
        warm = self.number > self._session.config.critic.warmup_steps
        return self._scope.start("warmup", work, () if warm else (critic,))

    def keep(self, rows: Handle, uids: Sequence[str]) -> Handle:
        """Rows of these prompts only."""

        async def work(results: list[Result]) -> Result:
            ref = merge(*(result.ref for result in results if result.ref))
            wanted = set(uids)
            return Result("keep", select_rows(ref, [key for key in row_keys(ref) if key.prompt in wanted]))

        return self._scope.start("keep", work, (rows,))

    def join(self, parts: Sequence[Handle]) -> Handle:
        """Rows and columns of several handles as one."""

        async def work(results: list[Result]) -> Result:
            return Result("join", merge(*(result.ref for result in results if result.ref)))

        return self._scope.start("join", work, parts)

    def report(self, name: str, values: Mapping[str, float]) -> Handle:
        """Numbers that the flow counted itself."""

        async def work(_: list[Result]) -> Result:
            return Result(name, metrics=dict(values))

        return self._scope.start(name, work, ())

    def metrics(self, handles: Sequence[Handle | None]) -> Handle:
        """The numbers of these calls as `call/name`; a skipped call has none."""

        async def work(_: list[Result]) -> Result:
            return Result("metrics", metrics=flatten([await handle for handle in handles if handle]))

        return self._scope.start("metrics", work, ())


def _listed(after: After) -> Sequence[Handle]:
    if after is None:
        return ()
    return (after,) if isinstance(after, Handle) else after
