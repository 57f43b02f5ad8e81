"""Which prompt comes next: the dataset in an order that follows from the run's seed alone."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shared.gen.sextet.v1 import rollout_pb2
from shared.routing import assign, home_of
from shared.seeds import derive_seed


@dataclass(frozen=True)
class Prompt:
    """A prompt of the dataset within a step, and the samples wanted of it; `step` drew it, 0: the present one."""

    uid: str
    index: int
    samples: tuple[int, ...]
    step: int = 0

    def message(self) -> rollout_pb2.PromptRow:
        return rollout_pb2.PromptRow(uid=self.uid, index=self.index, samples=self.samples, step=self.step)


class DatasetOrder:
    """The endless sequence of dataset rows: one permutation per epoch, the same for every run with this seed.

    Args:
        rows: rows in the dataset.
        seed: the run's seed.
        shuffle: off: dataset order, every epoch.
    """

    def __init__(self, rows: int, seed: int, shuffle: bool) -> None:
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._epoch = -1
        self._permutation: list[int] = []

    def at(self, position: int) -> int:
        """The dataset row at this position of the sequence."""
        epoch, offset = divmod(position, self._rows)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, list(range(self._rows))
            if self._shuffle:
                random.Random(derive_seed(self._seed, epoch, "", 0, "shuffle")).shuffle(self._permutation)
        return self._permutation[offset]


class PromptSource:
    """Hands out prompts of one step after another and knows how far it is (`position` is what a commit records)."""

    def __init__(self, order: DatasetOrder, samples: int, position: int = 0) -> None:
        self._order, self._samples = order, samples
        self.position = position

    def take(self, step: int, count: int, already: int = 0) -> list[Prompt]:
        """The next `count` prompts for `step`, which has taken `already` before."""
        return [self._next(step, already + k) for k in range(count)]

    def _next(self, step: int, k: int) -> Prompt:
        index = self._order.at(self.position)
        self.position += 1
        return Prompt(f"{step}:{index}:{k}", index, tuple(range(self._samples)))


def split_prompts(prompts: Sequence[Prompt], parts: int) -> list[list[Prompt]]:
    """Shares of about equal numbers of samples, none empty, in order; prompts are cut only when there are too few.

    A prompt's samples stay together where they can, because engines share the work of its prefix.
    """
    units = _units(prompts, parts)
    total, shares, seen = len(units), min(parts, len(units)), 0
    split = []
    for share in range(shares):
        end = total * (share + 1) // shares
        split.append(_rejoin(units[seen:end]))
        seen = end
    return split


def spread_prompts(
    prompts: Sequence[Prompt], speeds: Mapping[str, float], loads: Mapping[str, float]
) -> dict[str, list[Prompt]]:
    """Prompts for each replica, by speed and load; a prompt goes where it went before, if that costs no time.

    What is sampled does not depend on it. Replicas without prompts are left out.

    Args:
        speeds, loads: see shared.routing.assign.
    """
    units, names = _units(prompts, len(speeds)), sorted(speeds)
    weighed = [(float(len(unit.samples)), home_of(str(unit.index), names)) for unit in units]
    chosen = assign(weighed, speeds, loads)
    parts = {name: [unit for unit, taken in zip(units, chosen, strict=True) if taken == name] for name in speeds}
    return {name: _rejoin(part) for name, part in parts.items() if part}


def _units(prompts: Sequence[Prompt], parts: int) -> list[Prompt]:
    """Prompts; single samples of them when there are fewer prompts than parts."""
    if len(prompts) >= parts:
        return list(prompts)
    return [replace(prompt, samples=(sample,)) for prompt in prompts for sample in prompt.samples]


def _rejoin(units: Sequence[Prompt]) -> list[Prompt]:
    """Single samples of one prompt back into one row: a request names a prompt once."""
    joined: dict[str, Prompt] = {}
    for unit in units:
        before = joined.get(unit.uid)
        samples = (*(before.samples if before else ()), *unit.samples)
        joined[unit.uid] = replace(unit, samples=samples)
    return list(joined.values())
