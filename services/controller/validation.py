"""How good the policy is on prompts that it is not trained on."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from services.controller.dispatch import Dispatcher
from services.controller.journal import append_line
from services.controller.metrics import flatten
from services.controller.prompts import Prompt
from services.controller.summary import headlines
from services.controller.verbs import SCORE
from shared.config import DataConfig


class Validation:
    """Greedy answers to `data.validation_path`, one a prompt, scored as in training; kept in `validation.jsonl`.

    Args:
        directory: the run's directory.
    """

    def __init__(self, directory: Path, config: DataConfig) -> None:
        self._path, self._config = directory / "validation.jsonl", config

    def due(self, step: int, total: int) -> bool:
        """Whether the policy of this step is to be looked at, and has not been."""
        if not self._config.validation_path:
            return False
        return (step % self._config.validation_interval == 0 or step == total) and step not in self._seen()

    async def measure(self, dispatcher: Dispatcher, rows: int, step: int) -> dict[str, float]:
        """The numbers of the policy after `step`: headlines, and those of both calls.

        Args:
            rows: prompts in the dataset.
        """
        samples = await dispatcher.generate(prompts_of(rows), greedy=True, validation=True)
        assert samples.ref is not None
        scores = await dispatcher.perform(SCORE, samples.ref)
        numbers = flatten([samples, scores])
        metrics = {**headlines(numbers), **numbers}
        line = json.dumps({"step": step, **metrics}).encode() + b"\n"
        await asyncio.to_thread(append_line, self._path, line)
        return metrics

    def _seen(self) -> set[int]:
        if not self._path.exists():
            return set()
        return {json.loads(line)["step"] for line in self._path.read_text().splitlines()}


def prompts_of(rows: int) -> Sequence[Prompt]:
    """One sample of every prompt; the uid says that it is no training row."""
    return [Prompt(f"validation:{index}", index, (0,)) for index in range(rows)]
