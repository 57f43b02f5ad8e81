"""What a row is: its key, and the names and element types of its columns. Nothing but the standard library.

Every column is ragged: a row has any number of elements. "Per token" means per response token, in order;
a column of one element per row is a scalar column.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Dtype = Literal["int32", "float32", "uint8", "utf8"]


PART = "|"
"""Stands in a row's uid between its prompt's and the number of its part; no prompt's uid has it."""


class RowKey(NamedTuple):
    """One sample of one prompt, or a part of it; how columns made by different roles are joined."""

    uid: str
    sample: int

    @property
    def prompt(self) -> str:
        """The prompt's uid: rows that share it are a group."""
        return self.uid.partition(PART)[0]

    @property
    def whole(self) -> "RowKey":
        """Key of the sample that this row is, or is a part of: rows that share it count once in their group."""
        return RowKey(self.prompt, self.sample)

    def part(self, number: int) -> "RowKey":
        """Key of a sample's further row: a conversation may be several. Part 0 is the sample's own key."""
        return RowKey(f"{self.uid}{PART}{number}", self.sample) if number else self

    def __str__(self) -> str:
        return f"{self.uid}#{self.sample}"


def some(keys: Sequence[RowKey], most: int = 5) -> str:
    """A few keys for an error message."""
    shown = ", ".join(map(str, keys[:most]))
    return shown if len(keys) <= most else f"{shown} and {len(keys) - most} more"


# Samples, made by rollout.
PROMPT_IDS = "prompt_ids"
RESPONSE_IDS = "response_ids"
RESPONSE_MASK = "response_mask"
"""1 where the policy sampled the token."""
ROLLOUT_LOGPROBS = "rollout_logprobs"
"""Per token, at the sampling temperature."""
VERSIONS = "versions"
"""Per token: the weight version that sampled it."""
PROMPT_JSON = "prompt_json"
RESPONSE = "response"
"""The response as text, special tokens removed: for graders, never for training."""
DATA_SOURCE = "data_source"
GROUND_TRUTH = "ground_truth"
EXTRA_INFO = "extra_info"
"""JSON."""
FINISH = "finish"
"""stop or length; aborted: cut by a budget, to be gone on with."""

# Scores, made by reward; scalars.
SCORE = "score"
VALID = "valid"
"""0 where the row could not be graded; it then takes no part in training."""
SCORE_PREFIX = "score/"
"""score/NAME: a further named score."""

# Per token, made by reference, critic and actor.
REF_LOGPROBS = "ref_logprobs"
VALUES = "values"
"""The value before each response token."""
OLD_LOGPROBS = "old_logprobs"
ENTROPY = "entropy"
SUM_PI_SQUARED = "sum_pi_squared"
"""Sum of squared probabilities of the whole next-token distribution."""

# Made by actor.advantages; with ids, masks, old_logprobs, values, ref_logprobs and valid: the training batch.
ADVANTAGES = "advantages"
RETURNS = "returns"
LOSS_WEIGHTS = "loss_weights"

DTYPES: dict[str, Dtype] = {
    PROMPT_IDS: "int32",
    RESPONSE_IDS: "int32",
    RESPONSE_MASK: "uint8",
    ROLLOUT_LOGPROBS: "float32",
    VERSIONS: "int32",
    PROMPT_JSON: "utf8",
    RESPONSE: "utf8",
    DATA_SOURCE: "utf8",
    GROUND_TRUTH: "utf8",
    EXTRA_INFO: "utf8",
    FINISH: "utf8",
    SCORE: "float32",
    VALID: "uint8",
    REF_LOGPROBS: "float32",
    VALUES: "float32",
    OLD_LOGPROBS: "float32",
    ENTROPY: "float32",
    SUM_PI_SQUARED: "float32",
    ADVANTAGES: "float32",
    RETURNS: "float32",
    LOSS_WEIGHTS: "float32",
}

SAMPLE_COLUMNS = (
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    VERSIONS,
    PROMPT_JSON,
    RESPONSE,
    DATA_SOURCE,
    GROUND_TRUTH,
    EXTRA_INFO,
    FINISH,
)


def dtype_of(name: str) -> Dtype | None:
    """The element type that a column of this name must have; None when the name is a user's own."""
    return "float32" if name.startswith(SCORE_PREFIX) else DTYPES.get(name)
