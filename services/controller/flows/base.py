"""A flow: what one training step does, written down once."""

import inspect
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

from services.controller.calls import CallFailed, Handle
from services.controller.prompts import Prompt
from services.controller.roles import Actor, Critic, Reference, Reward, Rollout
from services.controller.step import After, Step
from shared.config import ConfigError, RunConfig


class DataFlow:
    """Subclass it and write `forward`.

    Every role call returns a handle at once. Passing a handle on is the dependency; calls that do not depend on each
    other run at the same time. `forward` may be `async def` where it has to look at results (`await handle`).

    Attributes:
        needs: roles that `forward` calls; known before the run starts. `reference` is added where KL wants it.
        config: the run's configuration; `config.options` is the flow's own.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"rollout", "reward", "actor"})

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._step: Step | None = None
        self.rollout = Rollout(self._playing)
        self.reward = Reward(self._playing)
        self.reference = Reference(self._playing)
        self.critic = Critic(self._playing)
        self.actor = Actor(self._playing)

    def forward(self, prompts: list[Prompt]) -> Handle | Awaitable[Handle]:
        """One step on these prompts; returns the handle whose metrics are the step's (see `metrics`)."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    @classmethod
    def roles(cls, config: RunConfig) -> frozenset[str]:
        """The roles that a run of this flow needs."""
        return cls.needs | ({"reference"} if config.algorithm.kl.placement != "none" else frozenset())

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raises ConfigError when the flow can't do what the configuration asks for."""

    @classmethod
    def carries(cls, config: RunConfig) -> bool:
        """Whether prompts may wait for a later step, and samples be older than the policy they train."""
        return config.rollout.budget > 0

    @property
    def uses_reference(self) -> bool:
        """The run has a reference role."""
        return "reference" in self.roles(self.config)

    def sync_weights(self, *, after: After) -> Handle:
        """Brings the actor's weights to the rollouts."""
        return self._playing().sync_weights(after)

    def warmup(self, critic: Handle) -> Handle:
        """As `after=`: skips a call until the critic has had `critic.warmup_steps` steps."""
        return self._playing().warmup(critic)

    def metrics(self, *handles: Handle | None) -> Handle:
        """The step's numbers: those of the given calls, as `call/name`."""
        return self._playing().metrics(handles)

    def more_prompts(self, count: int) -> list[Prompt]:
        """Further prompts of the dataset, for flows that throw some away."""
        return self._playing().prompts(count)

    def keep(self, rows: Handle, uids: Sequence[str]) -> Handle:
        """The rows of these prompts."""
        return self._playing().keep(rows, uids)

    def join(self, *parts: Handle) -> Handle:
        """All rows and columns of the parts."""
        return self._playing().join(parts)

    def report(self, name: str, **values: float) -> Handle:
        """Numbers of the flow's own, for `metrics`."""
        return self._playing().report(name, values)

    def overlap(self, sampling: Handle, update: Handle) -> Handle:
        """For `metrics`: the share of the time of `sampling` in which the step trained."""
        return self._playing().overlap(sampling, update)

    async def play(self, step: Step, prompts: Sequence[Prompt]) -> Handle:
        """Runs `forward` for a step."""
        self._step = step
        try:
            answer: Any = self.forward(list(prompts))
            handle = await answer if inspect.isawaitable(answer) and not isinstance(answer, Handle) else answer
        except CallFailed:
            raise
        except Exception as error:
            raise CallFailed("forward", error) from error
        if not isinstance(handle, Handle):
            raise CallFailed("forward", TypeError(f"forward returned {handle!r}: return self.metrics(...)"))
        return handle

    def _playing(self) -> Step:
        if self._step is None:
            raise RuntimeError("roles can be called in forward() only")
        return self._step


def refuse(condition: bool, message: str) -> None:
    """Raises ConfigError when the condition holds."""
    if condition:
        raise ConfigError(message)
