"""From dataset rows to prompt token ids, through the model's own chat template."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from shared.data.datasets import DataError, Dataset, Messages, PromptExample

log = structlog.get_logger()

MAX_KEPT_TOKENS = 1 << 24
"""64 MiB: an engine that waits for a step's prompts to be made into tokens stands still."""


def prompt_ids(tokenizer: Any, prompt: Messages | str, template_arguments: dict[str, Any]) -> list[int]:
    """Token ids of a prompt: messages through the chat template with the assistant's turn begun, text as it is.

    Args:
        tokenizer: Hugging Face's.
        template_arguments: further arguments of the template (enable_thinking, ...).

    Raises:
        DataError: messages, but the model has no chat template, or the template refuses them.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(tokenizer(prompt_text(tokenizer, prompt, template_arguments), add_special_tokens=False)["input_ids"])


def prompt_text(tokenizer: Any, prompt: Messages, template_arguments: dict[str, Any]) -> str:
    """Messages as the template's text, special tokens spelled out, the assistant's turn begun. Raises as prompt_ids."""
    if not tokenizer.chat_template:
        raise DataError(
            "the prompts are chat messages, but the model's tokenizer has no chat template: "
            "use an instruct model, or make the prompt column plain text"
        )
    try:
        # As text first: the template itself writes the special tokens it wants.
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **template_arguments)
    except Exception as error:  # noqa: BLE001 - a template raises what it likes
        raise DataError(f"the model's chat template refuses a prompt: {type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class Prompts:
    """The usable rows of a dataset.

    Attributes:
        rows: dataset rows that can be used, in order; prompt i is row rows[i].
        longest: tokens of the longest of them.
        kept: token ids of the first prompts, as far as memory is spent on it; the others' are made when asked for.
    """

    dataset: Dataset
    tokenizer: Any
    template_arguments: dict[str, Any]
    rows: Sequence[int]
    longest: int
    kept: "Sequence[array[int]]" = ()

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int) -> PromptExample:
        """Raises IndexError."""
        if not 0 <= index < len(self.rows):
            raise IndexError(f"{self.dataset.path} has no prompt {index}: {len(self.rows)} can be used")
        return self.dataset[self.rows[index]]

    def ids(self, index: int) -> list[int]:
        """Token ids of prompt `index`."""
        if 0 <= index < len(self.kept):
            return self.kept[index].tolist()
        return prompt_ids(self.tokenizer, self.example(index).prompt, self.template_arguments)


def open_prompts(
    dataset: Dataset,
    tokenizer: Any,
    *,
    max_tokens: int,
    overlong: Literal["error", "filter"],
    template_arguments: dict[str, Any],
) -> Prompts:
    """Measures every prompt once.

    Args:
        max_tokens: data.max_prompt_tokens, or less where the model's context is shorter.
        overlong: what to do with longer and with empty prompts: one error for all, or leave them out.

    Raises:
        DataError: naming rows, lengths and the options to change.
    """
    usable, lengths, bad = [], [], []
    kept: list[array[int]] = []
    total = 0
    for row, example in enumerate(dataset):
        ids: list[int] = []
        if example.prompt:
            try:
                ids = prompt_ids(tokenizer, example.prompt, template_arguments)
            except DataError as error:
                raise DataError(f"{dataset.path}, row {row}: {error}") from None
        if 0 < len(ids) <= max_tokens:
            usable.append(row)
            lengths.append(len(ids))
            total += len(ids)
            if total <= MAX_KEPT_TOKENS:
                kept.append(array("i", ids))
        else:
            bad.append((row, len(ids)))
    if bad and overlong == "error":
        raise DataError(_explain(dataset.path, bad, max_tokens))
    if not usable:
        raise DataError(f"{dataset.path}: all {len(bad)} prompts are empty or longer than {max_tokens} tokens")
    if bad:
        log.warning("prompts left out", dataset=dataset.path, count=len(bad), of=len(dataset), max_tokens=max_tokens)
    return Prompts(dataset, tokenizer, template_arguments, usable, max(lengths), kept)


def _explain(path: str, bad: Sequence[tuple[int, int]], max_tokens: int) -> str:
    shown = ", ".join(f"row {row} is empty" if not n else f"row {row} has {n} tokens" for row, n in bad[:5])
    more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
    return (
        f"{path}: {shown}{more}; prompts have 1 to {max_tokens} tokens: raise data.max_prompt_tokens (as far as the "
        "model's context goes with rollout.max_tokens), or set data.overlong_prompts=filter"
    )
