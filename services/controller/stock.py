"""Prompts that are drawn and not trained yet, in a run whose samples may be older than the policy.

What is known here of a sample is whether it is finished and which weights made its oldest token. Its tokens are rows on
the actor, held by reference: they outlive the rollout that made them and the step that asked for it.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.controller.prompts import Prompt
from shared.batch.columns import RowKey
from shared.batch.refs import merge, row_keys, select_rows
from shared.gen.sextet.v1 import batch_pb2

NOTHING = -1
"""Version of a sample that has no row yet."""


@dataclass(frozen=True)
class Sampled:
    """What a call answered about a row: the version of its oldest token, and whether it is finished."""

    oldest: int
    finished: bool


@dataclass(frozen=True)
class Waiting:
    """A drawn prompt.

    Attributes:
        oldest: of each sample, the version of its oldest token.
        finished: of each sample, whether it is.
    """

    prompt: Prompt
    oldest: tuple[int, ...]
    finished: tuple[bool, ...]

    @classmethod
    def drawn(cls, prompt: Prompt) -> "Waiting":
        return cls(prompt, (NOTHING,) * len(prompt.samples), (False,) * len(prompt.samples))

    @property
    def complete(self) -> bool:
        return all(self.finished)

    def unfinished(self) -> Prompt:
        """The prompt with the samples that are still to be generated, or to be gone on with."""
        left = [sample for sample, done in zip(self.prompt.samples, self.finished, strict=True) if not done]
        return replace(self.prompt, samples=tuple(left))

    def after(self, rows: Mapping[RowKey, Sampled]) -> "Waiting":
        """As it is once these rows were made."""
        before = map(Sampled, self.oldest, self.finished)
        now = [rows.get(key, known) for key, known in zip(self.row_keys(), before, strict=True)]
        return Waiting(self.prompt, tuple(row.oldest for row in now), tuple(row.finished for row in now))

    def row_keys(self) -> list[RowKey]:
        return [RowKey(self.prompt.uid, sample) for sample in self.prompt.samples]


@dataclass
class Stock:
    """All of them, in the order in which they were drawn.

    Attributes:
        rows: what is sampled of them so far.
        updates: the policy's versions after its last updates, ascending.
    """

    waiting: list[Waiting] = field(default_factory=list)
    rows: batch_pb2.BatchRef = field(default_factory=batch_pb2.BatchRef)
    updates: list[int] = field(default_factory=list)

    @classmethod
    def decode(cls, record: Mapping[str, Any]) -> "Stock":
        """Of what `encode` gave; {} is an empty one."""
        waiting = [
            Waiting(Prompt(uid, index, tuple(samples), step), tuple(oldest), tuple(map(bool, finished)))
            for uid, index, step, samples, oldest, finished in record.get("waiting", ())
        ]
        rows = batch_pb2.BatchRef.FromString(base64.b64decode(record.get("rows", "")))
        return cls(waiting, rows, list(record.get("updates", ())))

    def encode(self) -> dict[str, Any]:
        """As JSON values, for the journal."""
        if not self.waiting and not self.updates:
            return {}
        waiting = [
            [each.prompt.uid, each.prompt.index, each.prompt.step, each.prompt.samples, each.oldest, each.finished]
            for each in self.waiting
        ]
        rows = base64.b64encode(self.rows.SerializeToString(deterministic=True)).decode()
        return {"waiting": waiting, "rows": rows, "updates": self.updates}

    def admit(self, prompts: Iterable[Prompt]) -> None:
        """Takes in drawn prompts."""
        self.waiting += [Waiting.drawn(prompt) for prompt in prompts]

    def updated(self, version: int, keep: int) -> None:
        """The policy has this version now; the newest `keep` are remembered."""
        if not self.updates or version > self.updates[-1]:
            self.updates = [*self.updates, version][-keep:]

    def ages(self, waiting: Waiting) -> list[int]:
        """Of each sampled row, the updates that the policy has had since its oldest token."""
        return [sum(version > oldest for version in self.updates) for oldest in waiting.oldest if oldest != NOTHING]

    def age(self, waiting: Waiting) -> int:
        """Of its oldest row; 0 without any."""
        return max(self.ages(waiting), default=0)

    def since(self, limit: int) -> int:
        """The oldest version that a token may be of, to be no older than `limit` updates."""
        return self.updates[-1 - limit] if len(self.updates) > limit else 0

    def complete(self) -> list[Waiting]:
        """Those of which every sample is finished."""
        return [each for each in self.waiting if each.complete]

    def unfinished(self) -> list[Waiting]:
        """The others."""
        return [each for each in self.waiting if not each.complete]

    def begin_anew(self, limit: int) -> int:
        """Drops what is sampled of prompts that are older than `limit` updates; returns how many."""
        old = {each.prompt.uid for each in self.waiting if self.age(each) > limit}
        self.waiting = [Waiting.drawn(each.prompt) if each.prompt.uid in old else each for each in self.waiting]
        self.rows = _rows(self.rows, [key for key in row_keys(self.rows) if key.prompt not in old])
        return len(old)

    def take_in(self, made: batch_pb2.BatchRef, rows: Mapping[RowKey, Sampled]) -> None:
        """Rows that were made, or gone on with: they take the place of what was sampled of them before."""
        kept = [key for key in row_keys(self.rows) if key not in rows]
        self.rows = merge(_rows(self.rows, kept), made)
        self.waiting = [each.after(rows) for each in self.waiting]

    def take_out(self, count: int) -> tuple[batch_pb2.BatchRef, list[int]]:
        """Takes out `count` complete prompts, those first that can wait least; their rows, and the rows' ages."""
        chosen = {each.prompt.uid for each in sorted(self.complete(), key=lambda each: -self.age(each))[:count]}
        taken = [each for each in self.waiting if each.prompt.uid in chosen]
        ages = [age for each in taken for age in self.ages(each)]
        order = {each.prompt.uid: place for place, each in enumerate(taken)}
        keys = [key for key in row_keys(self.rows) if key.prompt in chosen]
        rows = _rows(self.rows, sorted(keys, key=lambda key: (order[key.prompt], key.sample, key.uid)))
        self.waiting = [each for each in self.waiting if each.prompt.uid not in chosen]
        self.rows = _rows(self.rows, [key for key in row_keys(self.rows) if key.prompt not in chosen])
        return rows, ages

    def without_rows(self) -> "Stock":
        """As after the roles lost what they held: the same prompts, nothing sampled of them but what is on disk."""
        return Stock([Waiting.drawn(each.prompt) for each in self.waiting], updates=self.updates)


def _rows(ref: batch_pb2.BatchRef, keys: Sequence[RowKey]) -> batch_pb2.BatchRef:
    return select_rows(ref, keys) if keys else batch_pb2.BatchRef()
