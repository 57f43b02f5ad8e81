"""Grades with a Hugging Face sequence-classification reward model: the one logit is the score."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from services.reward.backend import Grade, Item, failed, valid_grade
from shared.config import ModelConfig, RunConfig
from shared.rpc.errors import FailedPrecondition
from shared.training.device import pick_device

MAX_BATCH_TOKENS = 16_384
MAX_BATCH_ROWS = 32
MAX_TOKEN_BYTES = 256
"""No tokenizer's tokens are longer on average: what is certain to be too long is not tokenized first."""


class ModelBackend:
    """A frozen model with its own tokenizer and chat template.

    The prompt's messages and the response as the assistant's go through the template; a model without one gets prompt
    and response as a sentence pair. What the model cannot hold is invalid, since a cut text is another text.
    """

    def __init__(self) -> None:
        self._loaded: LoadedModel | None = None

    async def open(self, config: RunConfig) -> dict[str, str]:
        assert config.reward.model is not None
        self._loaded = await asyncio.to_thread(LoadedModel, config.reward.model)
        return {"model": config.reward.model.path, "device": str(self._loaded.device)}

    async def score(self, run: str, items: Sequence[Item]) -> list[Grade]:
        if self._loaded is None:
            raise FailedPrecondition("reward.model is not loaded", key="reward.model")
        return await asyncio.to_thread(self._loaded.score, items)

    async def close(self) -> None:
        self._loaded = None


class LoadedModel:
    """The model in memory; synchronous."""

    def __init__(self, config: ModelConfig) -> None:
        path = config.path
        try:
            self.device = pick_device(config.device)
        except ValueError as error:
            raise FailedPrecondition(f"reward.{error}", key="reward.model.device", value=config.device) from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                path,
                dtype=getattr(torch, config.dtype),
                output_loading_info=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except (OSError, ValueError) as error:
            where = "" if Path(path).exists() else " (no such directory, and not to be had from the hub)"
            raise _unusable(path, f"cannot be loaded{where}: {error}") from None
        if missing := sorted(report["missing_keys"]):
            raise _unusable(path, f"has no trained classification head: {missing[:3]} would be random")
        if model.config.num_labels != 1:
            raise _unusable(path, f"has {model.config.num_labels} labels; a reward model has one")
        self._model: Any = model.to(self.device).eval()
        self._limit = min(self._tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 1 << 30))
        # Decoder models find a row's last token by the padding id; without one, rows can only go alone.
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self._tokenizer.pad_token_id
        self._rows = MAX_BATCH_ROWS if model.config.pad_token_id is not None else 1

    @torch.inference_mode()
    def score(self, items: Sequence[Item]) -> list[Grade]:
        encoded = [self._encoded(item) for item in items]
        grades = [row if isinstance(row, Grade) else self._too_long(len(row["input_ids"])) for row in encoded]
        fitting = {
            index: row
            for index, row in enumerate(encoded)
            if not isinstance(row, Grade) and len(row["input_ids"]) <= self._limit
        }
        for batch in self._batches(fitting):
            scores_B = self._logits([fitting[index] for index in batch])
            for index, score in zip(batch, scores_B.tolist(), strict=True):
                grades[index] = valid_grade(score)
        return grades

    def _encoded(self, item: Item) -> dict[str, list[int]] | Grade:
        """Token ids, or why there are none: a prompt that no template takes must not cost the other rows."""
        if item.size > self._limit * MAX_TOKEN_BYTES:
            return failed("too_long", f"{item.size} bytes; reward.model holds {self._limit} tokens")
        try:
            return self._encode(item)
        except Exception as error:  # noqa: BLE001 - a chat template raises what it likes
            return failed("rejected", f"{type(error).__name__}: {error}")

    def _encode(self, item: Item) -> dict[str, list[int]]:
        prompt = item.prompt
        if self._tokenizer.chat_template is None:
            text = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
            return dict(self._tokenizer(text, item.response))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages.append({"role": "assistant", "content": item.response})
        return dict(self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True))

    def _batches(self, encoded: Mapping[int, dict[str, list[int]]]) -> Iterator[list[int]]:
        """Rows of like length together, bounded by rows and by padded tokens."""
        batch: list[int] = []
        for index in sorted(encoded, key=lambda i: len(encoded[i]["input_ids"])):
            tokens = (len(batch) + 1) * len(encoded[index]["input_ids"])
            if batch and (len(batch) == self._rows or tokens > MAX_BATCH_TOKENS):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _logits(self, rows: list[dict[str, list[int]]]) -> torch.Tensor:
        if len(rows) == 1:
            inputs = {name: torch.tensor([values]) for name, values in rows[0].items()}
        else:
            inputs = self._tokenizer.pad(rows, padding_side="right", return_tensors="pt")
        output = self._model(**{name: tensor.to(self.device) for name, tensor in inputs.items()})
        return output.logits[:, 0].float().cpu()

    def _too_long(self, tokens: int) -> Grade:
        return failed("too_long", f"{tokens} tokens; reward.model holds {self._limit}")


def _unusable(path: str, why: str) -> FailedPrecondition:
    return FailedPrecondition(f"reward.model.path={path!r} {why}", key="reward.model.path", value=path)
