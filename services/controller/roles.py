"""What a flow calls: `self.actor.update(batch)` returns a handle at once."""

from collections.abc import Callable, Sequence

from services.controller import verbs
from services.controller.calls import Handle
from services.controller.prompts import Prompt
from services.controller.step import After, Step


class Role:
    """Base of the roles. `step` answers the step that is being played."""

    def __init__(self, step: Callable[[], Step]) -> None:
        self._step = step

    def _call(self, verb: verbs.Verb, *inputs: Handle | None, after: After = None) -> Handle:
        return self._step().call(verb, inputs, after)


class Rollout(Role):
    """Samples answers."""

    def generate(self, prompts: Sequence[Prompt], *, baseline: bool = False, after: After = None) -> Handle:
        """`rollout.n` samples of every prompt; with `baseline` also a greedy one, as sample number n (ReMax)."""
        return self._step().generate(prompts, baseline, after)

    def ready(self, prompts: Sequence[Prompt], *, after: After = None) -> Handle:
        """A batch that `ahead` made in the step before; in the first step it is sampled now, of these prompts."""
        return self._step().ready(prompts, after)

    def ahead(self, *, after: After = None) -> Handle:
        """Samples the prompts in flight for the next step. Weights are synced after it: a sample has one version."""
        return self._step().ahead(after)


class Reward(Role):
    """Grades answers."""

    def score(self, samples: Handle, *, after: After = None) -> Handle:
        """A score, or none, for every row."""
        return self._call(verbs.SCORE, samples, after=after)


class Reference(Role):
    """The frozen policy."""

    def logprobs(self, samples: Handle, *, after: After = None) -> Handle:
        """Its log-probs of the sampled tokens."""
        return self._call(verbs.REFERENCE_LOGPROBS, samples, after=after)


class Critic(Role):
    """The value model."""

    def values(self, samples: Handle, *, after: After = None) -> Handle:
        """The value before each response token."""
        return self._call(verbs.VALUES, samples, after=after)

    def update(self, batch: Handle, *, after: After = None) -> Handle:
        """Optimizer steps on a batch with returns."""
        return self._call(verbs.CRITIC_UPDATE, batch, after=after)


class Actor(Role):
    """The policy in training."""

    def logprobs(self, samples: Handle, *, after: After = None) -> Handle:
        """Its log-probs of the sampled tokens, before the update."""
        return self._call(verbs.LOGPROBS, samples, after=after)

    def advantages(self, *columns: Handle | None, after: After = None) -> Handle:
        """The training batch, from whatever columns the algorithm needs; None for those it does without."""
        return self._call(verbs.ADVANTAGES, *columns, after=after)

    def update(self, batch: Handle, *, after: After = None) -> Handle:
        """Optimizer steps on the batch."""
        return self._call(verbs.ACTOR_UPDATE, batch, after=after)
