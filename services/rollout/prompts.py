"""A run's prompts: training and validation, with the tokenizer and the tokens that end a response."""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, GenerationConfig

from shared.config import RunConfig
from shared.data.datasets import DataError, Dataset
from shared.data.prompts import Prompts, open_prompts
from shared.training.errors import ModelError
from shared.training.models import load_tokenizer


@dataclass(frozen=True)
class RunPrompts:
    """What a run samples responses to.

    Attributes:
        end_ids: the model's own end-of-sequence tokens, sorted.
    """

    tokenizer: Any
    training: Prompts
    validation: Prompts | None
    end_ids: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.training.longest, self.validation.longest if self.validation else 0)

    def of(self, validation: bool) -> Prompts:
        """Raises DataError when there is no validation dataset."""
        if not validation:
            return self.training
        if self.validation is None:
            raise DataError("the run has no validation dataset: set data.validation_path")
        return self.validation

    def facts(self) -> dict[str, str]:
        """For the controller."""
        return {
            "dataset_rows": str(len(self.training)),
            "dataset_digest": self.training.dataset.digest,
            "validation_rows": str(len(self.validation) if self.validation else 0),
            "longest_prompt": str(self.longest),
            "eos_token_ids": ",".join(map(str, self.end_ids)),
        }


def load_prompts(config: RunConfig) -> RunPrompts:
    """Opens and measures the datasets. Blocks: call it in a thread.

    Raises:
        DataError, ModelError: naming the option to change.
    """
    data = config.data
    # The model and its tokenizer are looked at first: a wrong model.path should not read as a problem of the data.
    tokenizer = load_tokenizer(config.model)
    settings = AutoConfig.from_pretrained(config.model.path, trust_remote_code=False).get_text_config()
    vocabulary = getattr(settings, "vocab_size", len(tokenizer))
    if beyond := [each for each in config.rollout.stop_token_ids if each >= vocabulary]:
        raise ModelError(
            f"rollout.stop_token_ids: {beyond[0]} is no token of this model, whose vocabulary has {vocabulary}"
        )
    room = getattr(settings, "max_position_embeddings", None)
    most = data.max_prompt_tokens if room is None else min(data.max_prompt_tokens, room - 1)

    def opened(path: str) -> Prompts:
        return open_prompts(
            Dataset(path, data.prompt_key),
            tokenizer,
            max_tokens=most,
            overlong=data.overlong_prompts,
            template_arguments=data.chat_template_kwargs,
        )

    validation = opened(data.validation_path) if data.validation_path else None
    return RunPrompts(tokenizer, opened(data.path), validation, _end_ids(config.model.path, settings, tokenizer))


def _end_ids(path: str, settings: Any, tokenizer: Any) -> tuple[int, ...]:
    """All that the model's files call end of sequence: instruct models often end a turn otherwise than a text."""
    try:
        generation = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        generation = None
    found: set[int] = set()
    for value in (generation, settings.eos_token_id, tokenizer.eos_token_id):
        found.update([] if value is None else [value] if isinstance(value, int) else value)
    return tuple(sorted(found))
