"""DAPO: prompts whose answers are all equally good teach nothing and are replaced."""

import math
from statistics import mean

from services.controller.calls import Handle, Result
from services.controller.flows.base import DataFlow, refuse
from services.controller.prompts import Prompt
from shared.batch.columns import RowKey
from shared.batch.refs import row_keys
from shared.config import RunConfig

MAX_REFILLS = 9


class DAPO(DataFlow):
    """One step of DAPO's dynamic sampling (Yu et al. 2025, section 3.2).

    Prompts are drawn until `data.batch_size` of them have answers of differing scores, at most `options.max_refills`
    (default 9) times after the first. A step that ends short trains on what it has: losses are scaled by global counts,
    so a short batch is not a larger step. A step without any changes nothing but its number.
    """

    @classmethod
    def check(cls, config: RunConfig) -> None:
        refuse(config.rollout.n < 2, f"flow: dapo compares answers to one prompt: rollout.n={config.rollout.n} is < 2")
        refuse(config.algorithm.advantage in ("gae", "remax"), "flow: dapo needs a group estimator: advantage=grpo")
        refuse(config.rollout.budget > 0, "flow: dapo throws prompts away, and none may wait: set rollout.budget=0")
        refills = config.options.get("max_refills", MAX_REFILLS)
        refuse(not isinstance(refills, int) or refills < 0, f"options.max_refills={refills!r} is not a count")

    async def forward(self, prompts: list[Prompt]) -> Handle:
        wanted, refills = len(prompts), self.config.options.get("max_refills", MAX_REFILLS)
        kept: list[Handle] = []
        found = drawn = 0
        while True:
            drawn += len(prompts)
            samples = self.rollout.generate(prompts)
            scores = self.reward.score(samples)
            chosen = informative(await scores)[: wanted - found]
            found += len(chosen)
            kept += [self.keep(samples, chosen), self.keep(scores, chosen)]
            if found == wanted or refills == 0:
                break
            refills -= 1
            prompts = self.more_prompts(wanted)
        sampling = self.report("dapo", prompts_drawn=drawn, prompts_kept=found)
        if not found:
            return self.metrics(samples, scores, sampling)
        joined = self.join(*kept)
        reference = self.reference.logprobs(joined) if self.uses_reference else None
        batch = self.actor.advantages(joined, reference, self.actor.logprobs(joined))
        actor = self.actor.update(batch)
        self.sync_weights(after=actor)
        return self.metrics(samples, scores, sampling, batch, actor)


def informative(scored: Result) -> list[str]:
    """Uids of prompts whose graded answers do not all have the same score, in order.

    The score of an answer in several rows (a conversation whose history was rewritten) is their mean.
    """
    assert scored.ref is not None
    answers: dict[RowKey, list[float]] = {}
    for key, score in zip(row_keys(scored.ref), scored.scores, strict=True):
        if not math.isnan(score):
            answers.setdefault(key.whole, []).append(score)
    seen: dict[str, set[float]] = {}
    for key, parts in answers.items():
        seen.setdefault(key.uid, set()).add(mean(parts))
    return [uid for uid, scores in seen.items() if len(scores) > 1]
