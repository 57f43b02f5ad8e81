"""Prompt datasets checked before a run: verl's columns, the model's chat template, the length of every prompt."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.data.datasets import DataError, Dataset, PromptExample
from shared.data.prompts import prompt_ids

Padding = bool | Literal["longest", "max_length", "do_not_pad"]
SHOWN = 5


@dataclass(frozen=True)
class PromptDataset:
    """The prompts of a file, tokenized. Rollout makes the same tokens of the same file and needs no padding; the
    padded ones here are for other uses and for looking at them.

    Attributes:
        path, prompt_key: where they are.
        max_length: tokens a prompt may have.
        lengths: tokens of each prompt, without padding.
        input_ids, attention_mask: of each prompt, padded as asked for.
    """

    path: str
    prompt_key: str
    max_length: int
    examples: Dataset
    lengths: list[int]
    input_ids: list[list[int]]
    attention_mask: list[list[int]]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`: input_ids, attention_mask, prompt, data_source, ground_truth, extra_info (JSON)."""
        example = self.examples[index]
        return {
            "input_ids": self.input_ids[index],
            "attention_mask": self.attention_mask[index],
            "prompt": example.prompt,
            "data_source": example.data_source,
            "ground_truth": example.ground_truth,
            "extra_info": example.extra_info,
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


class DatasetBuilder:
    """Builds a PromptDataset of a file.

    Args:
        tokenizer: a Hugging Face tokenizer, or the hub id or directory of one.
        max_length: tokens a prompt may have, the chat template's included.
        padding: as Hugging Face tokenizers mean it: True or "longest", "max_length", False or "do_not_pad"; on the
            tokenizer's padding_side.
        prompt_key: the column of prompts.
        chat_template_kwargs: further arguments of the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int = 512,
        padding: Padding = False,
        *,
        prompt_key: str = "prompt",
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if max_length < 1:
            raise DataError(f"max_length={max_length} must be at least 1")
        known = (True, False, "longest", "max_length", "do_not_pad")
        if padding not in known:
            near = difflib.get_close_matches(str(padding), [str(p) for p in known], 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(map(str, known))}"
            raise DataError(f"padding={padding!r} is unknown; {hint}")
        self._tokenizer = _loaded(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
        self._max_length, self._padding, self._prompt_key = max_length, padding, prompt_key
        self._template_arguments = chat_template_kwargs or {}

    def build_from_parquet(self, path: str | Path) -> PromptDataset:
        """Reads a parquet (or jsonl) file in verl's columns.

        Raises:
            DataError: no such file, a column is missing, or prompts are empty or too long: names the first of them.
        """
        examples = Dataset(str(path), self._prompt_key)
        _check_columns(examples, self._prompt_key)
        ids = [self._ids(example, f"{path}, row {row}") for row, example in enumerate(examples)]
        self._check_lengths(str(path), ids)
        width = self._max_length if self._padding == "max_length" else None
        padded = self._tokenizer.pad({"input_ids": ids}, padding=self._padding, max_length=width)
        return PromptDataset(
            path=str(path),
            prompt_key=self._prompt_key,
            max_length=self._max_length,
            examples=examples,
            lengths=[len(row) for row in ids],
            input_ids=padded["input_ids"],
            attention_mask=padded["attention_mask"],
        )

    def _ids(self, example: PromptExample, where: str) -> list[int]:
        try:
            return prompt_ids(self._tokenizer, example.prompt, self._template_arguments) if example.prompt else []
        except DataError as error:
            raise DataError(f"{where}: {error}") from None

    def _check_lengths(self, path: str, ids: Sequence[Sequence[int]]) -> None:
        bad = [(row, len(tokens)) for row, tokens in enumerate(ids) if not 0 < len(tokens) <= self._max_length]
        if bad:
            shown = ", ".join(f"row {row} has {n} tokens" if n else f"row {row} is empty" for row, n in bad[:SHOWN])
            more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
            raise DataError(
                f"{path}: {shown}{more}; prompts have 1 to {self._max_length} tokens: raise max_length, "
                "or leave these rows out of the file"
            )


def _check_columns(examples: Dataset, prompt_key: str) -> None:
    missing = [name for name in ("data_source", "reward_model") if name not in examples.columns]
    if missing:
        raise DataError(
            f"{examples.path} has no column {' and no column '.join(missing)}; it has {', '.join(examples.columns)}: "
            f"verl's columns are data_source, {prompt_key}, ability, reward_model {{style, ground_truth}}, extra_info"
        )


def _loaded(name: str | Path) -> Any:
    # Here and not at the top: transformers brings torch with it, which only this way of naming a tokenizer needs.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(name), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer {str(name)!r} can't be loaded: {str(error).strip().splitlines()[0]}") from None
