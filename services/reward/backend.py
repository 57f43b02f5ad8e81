"""What the reward role asks of whoever grades, and the plain data that crosses that line."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.config import RunConfig

FLOAT32_MAX = 3.4028234663852886e38
MAX_PARTS = 16
MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True)
class Item:
    """One response to grade, as text; the fields are those of `ScoreItem` in reward.proto."""

    uid: str
    sample: int
    data_source: str
    prompt_json: str
    response: str
    ground_truth: str
    extra_info_json: str

    @property
    def prompt(self) -> Any:
        """Chat messages, or text."""
        return _parsed(self.prompt_json, self.prompt_json)

    @property
    def extra_info(self) -> Any:
        """As the dataset has it; an empty dict where it has none."""
        return _parsed(self.extra_info_json, {})

    @property
    def size(self) -> int:
        """Bytes of its text."""
        texts = (self.prompt_json, self.response, self.ground_truth, self.extra_info_json)
        return sum(len(text.encode(errors="surrogatepass")) for text in texts)


@dataclass(frozen=True)
class Grade:
    """A score, or why there is none.

    `kind` is empty for a valid grade, else a short word that errors are counted by: raised, timeout, exited, score
    (not a finite number), shape (wrong number of results), too_long, rejected.
    """

    score: float = math.nan
    parts: Mapping[str, float] = field(default_factory=dict)
    kind: str = ""
    error: str = ""

    @property
    def valid(self) -> bool:
        return not self.kind


class RewardBackend(Protocol):
    """Grades text. One is open per configured run."""

    async def open(self, config: RunConfig) -> dict[str, str]:
        """Makes it ready; returns facts to show. Raises FailedPrecondition or Unavailable naming the key at fault."""
        ...

    async def score(self, run: str, items: Sequence[Item]) -> list[Grade]:
        """One grade per item, in order. Raises Unavailable or FailedPrecondition only when no item can be graded."""
        ...

    async def close(self) -> None:
        """Ends what `open` started. Idempotent."""
        ...


def valid_grade(score: object, parts: object = None) -> Grade:
    """A grade from what a grader answered: invalid unless the score is a finite float32; other parts are dropped."""
    number = finite(score)
    if number is None:
        return failed("score", f"the score {shorten(repr(score), 80)} is not a finite number")
    named = parts.items() if isinstance(parts, Mapping) else ()
    numbers = {str(name): value for name, part in named if (value := finite(part)) is not None and _plain(name)}
    return Grade(number, dict(list(numbers.items())[:MAX_PARTS]))


def failed(kind: str, error: str) -> Grade:
    """The grade of an item that could not be graded."""
    return Grade(kind=kind, error=shorten(error, MAX_ERROR_CHARACTERS))


def finite(value: object) -> float | None:
    """The value as a float when it is a number that float32 can hold, else None."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= FLOAT32_MAX else None


def shorten(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def _plain(name: object) -> bool:
    """Part names become column and metric names, so they stay short and printable."""
    return isinstance(name, str) and 0 < len(name) <= 64 and name.replace("_", "").replace(".", "").isalnum()


def _parsed(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
