"""Conversations over the endpoint as samples to train on.

A turn's prompt is made of the token ids that were sampled, never of their text (law 5): where the template's text of
the new messages begins with the text of an earlier turn and its answer, only what follows is tokenized, and appended.
The same holds where its ids begin with theirs. Where neither is so (a template that strips thinking, an agent that
edits history), nothing is guessed: the turn begins a sample of its own, with the new history as its prompt.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.rollout.backend import Sample, SamplingParams
from services.rollout.tasks import Task
from services.rollout.text import decode, response_text
from shared.batch import columns
from shared.batch.block import Block, Ragged, RowKey
from shared.rpc.errors import Internal, NotFound, ResourceExhausted

MAX_SESSIONS = 4096
IDLE_SECONDS = 3600.0
"""A session that nobody has used for so long makes room when there are too many."""


@dataclass(frozen=True)
class Turn:
    """One answer of the policy.

    Attributes:
        parent: the turn whose ids its prompt begins with; None: it begins anew.
        text: the template's text of the prompt.
        said: what the template's text has to go on with, if history is as it was.
    """

    parent: int | None
    messages: tuple[dict[str, Any], ...]
    sample: Sample
    text: str
    said: str

    @property
    def ids(self) -> list[int]:
        """Prompt and answer."""
        return [*self.sample.prompt_ids, *self.sample.response_ids]


@dataclass
class Session:
    """A conversation, and what is known about it.

    Attributes:
        uid, sample: row key of what it is exported as; samples of one uid are a group (GRPO).
        reward: of the whole conversation; None: not graded.
        task: whose row it is to become, in a run whose samples are conversations.
        answering: turns in progress.
        begun: turns that were ever begun.
    """

    id: str
    run: str
    uid: str
    sample: int = 0
    data_source: str = ""
    ground_truth: str = ""
    extra_info: str = "{}"
    reward: float | None = None
    task: Task | None = None
    turns: list[Turn] = field(default_factory=list)
    answering: int = 0
    begun: int = 0
    used: float = field(default_factory=time.monotonic)

    @property
    def idle(self) -> float:
        """Seconds since its agent was last heard of, or answered."""
        return 0.0 if self.answering else time.monotonic() - self.used

    @property
    def over(self) -> bool:
        """Its task is another's now, or nobody waits for it any more."""
        return self.task is not None and self.task.session is not self

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A turn is in progress meanwhile."""
        self.answering, self.begun = self.answering + 1, self.begun + 1
        try:
            yield
        finally:
            self.answering, self.used = self.answering - 1, time.monotonic()

    def continues(self, text: str) -> tuple[int | None, str]:
        """The latest turn that this prompt text goes on from, and what follows it; (None, text) when there is none."""
        for place in reversed(range(len(self.turns))):
            turn = self.turns[place]
            if text.startswith(turn.text + turn.said):
                return place, text[len(turn.text) + len(turn.said) :]
        return None, text

    def prompt(self, tokenizer: Any, text: str) -> tuple[int | None, list[int]]:
        """The turn that is gone on from, and the prompt's ids."""
        parent, rest = self.continues(text)
        ids = list(tokenizer(rest, add_special_tokens=False)["input_ids"]) if rest else []
        if parent is not None:
            return parent, [*self.turns[parent].ids, *ids]
        # A tokenizer that drops spaces gives back another text than the template's, and yet the same ids.
        for place in reversed(range(len(self.turns))):
            before = self.turns[place].ids
            if ids[: len(before)] == before:
                return place, ids
        return None, ids

    def add(self, parent: int | None, messages: Sequence[dict[str, Any]], text: str, sample: Sample, said: str) -> None:
        """Takes an answer; see Turn."""
        self.turns.append(Turn(parent, tuple(messages), sample, text, said))

    def chains(self) -> list[list[Turn]]:
        """Turns that become one sample each: every turn is in exactly one, so that no token is trained twice."""
        chains: list[list[int]] = []
        for place, turn in enumerate(self.turns):
            found = next((chain for chain in chains if turn.parent is not None and chain[-1] == turn.parent), None)
            if found is None:
                chains.append([place])
            else:
                found.append(place)
        return [[self.turns[place] for place in chain] for chain in chains]


class Sessions:
    """The sessions of one replica. Their ids begin with its name, so that a gateway finds them."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._sessions: dict[str, Session] = {}

    def start(self, run: str, **about: Any) -> Session:
        """A new session; `about` as Session's attributes.

        Raises:
            ResourceExhausted: too many are in use.
        """
        if len(self._sessions) >= MAX_SESSIONS:
            # Agents that are lost never ask for theirs again.
            self._sessions = {id: each for id, each in self._sessions.items() if each.run == run and not each.over}
        if len(self._sessions) >= MAX_SESSIONS:
            oldest = min(self._sessions.values(), key=lambda session: session.used)
            if oldest.idle < IDLE_SECONDS:
                raise ResourceExhausted(f"{MAX_SESSIONS} sessions are in use: export or delete some")
            del self._sessions[oldest.id]
        id = f"{self._replica}.{secrets.token_hex(8)}"
        session = self._sessions[id] = Session(id, run, about.pop("uid", "") or f"session:{id}", **about)
        return session

    def get(self, id: str, run: str) -> Session:
        """Raises NotFound: it never was, is over, belongs to another run, or its task is another's now."""
        session = self._sessions.get(id)
        if session and session.over:
            del self._sessions[id]
            raise NotFound(f"session {id!r} is over: it was idle for too long, or its step began anew; claim another")
        if session is None or session.run != run:
            raise NotFound(f"there is no session {id!r}: it is over or was deleted, or its replica was restarted")
        session.used = time.monotonic()
        return session

    def drop(self, id: str) -> Session | None:
        """Forgets a session, if it is there."""
        return self._sessions.pop(id, None)


def block_of(sessions: Sequence[Session], tokenizer: Any) -> Block:
    """One row per chain, with the columns of samples, and score and valid from the reward.

    The first chain's key is (uid, sample); a further one's uid ends in |1, |2 ... Tokens that the policy did not sample
    (tools, users, the template) have mask 0 and log-prob 0.

    Raises:
        Internal: a turn's prompt does not begin with the turn it goes on from.
    """
    rows = [(session, number, chain) for session in sessions for number, chain in enumerate(session.chains())]
    keys = [RowKey(session.uid, session.sample).part(number) for session, number, _ in rows]
    parts = [_row(chain) for _, _, chain in rows]
    texts = {
        columns.PROMPT_JSON: [json.dumps(list(chain[0].messages)) for _, _, chain in rows],
        columns.RESPONSE: [decode(tokenizer, ids) for ids, *_ in parts],
        columns.DATA_SOURCE: [session.data_source for session, *_ in rows],
        columns.GROUND_TRUTH: [session.ground_truth for session, *_ in rows],
        columns.EXTRA_INFO: [session.extra_info for session, *_ in rows],
        columns.FINISH: [chain[-1].sample.finish for _, _, chain in rows],
    }
    rewards = [session.reward for session, *_ in rows]
    found = {
        columns.PROMPT_IDS: Ragged.from_rows([chain[0].sample.prompt_ids for _, _, chain in rows], "int32"),
        columns.RESPONSE_IDS: Ragged.from_rows([ids for ids, *_ in parts], "int32"),
        columns.RESPONSE_MASK: Ragged.from_rows([mask for _, mask, _, _ in parts], "uint8"),
        columns.ROLLOUT_LOGPROBS: Ragged.from_rows([logprobs for _, _, logprobs, _ in parts], "float32"),
        columns.VERSIONS: Ragged.from_rows([versions for *_, versions in parts], "int32"),
        columns.SCORE: Ragged.from_scalars(np.array([reward or 0.0 for reward in rewards]), "float32"),
        columns.VALID: Ragged.from_scalars(np.array([reward is not None for reward in rewards]), "uint8"),
        **{name: Ragged.from_text(text) for name, text in texts.items()},
    }
    return Block(tuple(keys), found)


def _row(chain: Sequence[Turn]) -> tuple[list[int], list[int], list[float], list[int]]:
    """Response ids, mask, log-probs and versions of a chain, all after the first turn's prompt."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in chain:
        sample = turn.sample
        known = [*chain[0].sample.prompt_ids, *ids]
        if list(sample.prompt_ids[: len(known)]) != known:
            raise Internal("a turn's prompt does not begin with the turn before: its tokens can't be one sample")
        given = sample.prompt_ids[len(known) :]
        ids += [*given, *sample.response_ids]
        mask += [0] * len(given) + [1] * len(sample.response_ids)
        logprobs += [0.0] * len(given) + list(sample.logprobs)
        versions += [sample.versions[0]] * len(given) + list(sample.versions)
    return ids, mask, logprobs, versions


def said_by(tokenizer: Any, sample: Sample, params: SamplingParams) -> str:
    """What history has to say of an answer: the text that was given for it, and the token that ended it.

    Where a stop string was cut off, the text with it: history without it is not what was sampled.
    """
    if sample.finish != "stop":
        return response_text(tokenizer, sample, params)
    whole, last = decode(tokenizer, sample.response_ids), sample.response_ids[-1]
    if last not in params.stop_token_ids or last not in tokenizer.all_special_ids:
        return whole
    return whole + tokenizer.decode([last], skip_special_tokens=False, clean_up_tokenization_spaces=False)
