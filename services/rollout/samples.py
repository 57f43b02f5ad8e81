"""Samples as a block of columns, and the numbers of a generation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.rollout.backend import Sample, SampleRequest, SamplingParams
from services.rollout.text import response_texts
from shared.batch import columns
from shared.batch.block import Block, Ragged, RowKey
from shared.data.datasets import PromptExample


@dataclass(frozen=True)
class Generated:
    """What a Generate call made.

    Attributes:
        tokens: prompt and response tokens of each row.
        oldest: of each row, the oldest version among its tokens.
        cut: places of the rows that the budget cut.
    """

    block: Block
    tokens: list[int]
    metrics: dict[str, float]
    oldest: list[int]
    cut: list[int]


def block_of(
    samples: Sequence[Sample], examples: Sequence[PromptExample], tokenizer: Any, params: SamplingParams
) -> Block:
    """One row per sample, in this order; `examples` are the dataset rows they answer."""
    texts = {
        columns.PROMPT_JSON: [example.prompt_json for example in examples],
        columns.RESPONSE: response_texts(tokenizer, samples, params),
        columns.DATA_SOURCE: [example.data_source for example in examples],
        columns.GROUND_TRUTH: [example.ground_truth for example in examples],
        columns.EXTRA_INFO: [example.extra_info for example in examples],
        columns.FINISH: [sample.finish for sample in samples],
    }
    found = {
        **earlier_of(samples),
        # The stop token was sampled like any other: it is trained, too.
        columns.RESPONSE_MASK: Ragged.from_rows([np.ones(len(sample.response_ids)) for sample in samples], "uint8"),
        **{name: Ragged.from_text(text) for name, text in texts.items()},
    }
    return Block(tuple(RowKey(sample.uid, sample.sample) for sample in samples), found)


EARLIER = (columns.PROMPT_IDS, columns.RESPONSE_IDS, columns.ROLLOUT_LOGPROBS, columns.VERSIONS)
"""What is needed of a row to go on with it."""


def earlier_of(samples: Sequence[Sample]) -> dict[str, Ragged]:
    """Columns EARLIER of these samples."""
    return {
        columns.PROMPT_IDS: Ragged.from_rows([sample.prompt_ids for sample in samples], "int32"),
        columns.RESPONSE_IDS: Ragged.from_rows([sample.response_ids for sample in samples], "int32"),
        columns.ROLLOUT_LOGPROBS: Ragged.from_rows([sample.logprobs for sample in samples], "float32"),
        columns.VERSIONS: Ragged.from_rows([sample.versions for sample in samples], "int32"),
    }


def samples_of(block: Block) -> dict[RowKey, Sample]:
    """The rows of a block with columns EARLIER, as samples to go on with."""
    parts = zip(block.rows, *(block[name].rows() for name in EARLIER), strict=True)
    return {
        key: Sample(key.uid, key.sample, *(tuple(values.tolist()) for values in row), finish="aborted")
        for key, *row in parts
    }


def limited(request: SampleRequest, budget: int) -> SampleRequest:
    """The request with room for `budget` tokens more at most."""
    already = len(request.partial.response_ids) if request.partial else 0
    most = min(request.params.max_tokens, already + budget)
    return replace(request, params=replace(request.params, max_tokens=most))


def told_apart(sample: Sample, params: SamplingParams, context: int) -> Sample:
    """A sample that a budget ended, as aborted: it has room left, by the run's own limits."""
    length = len(sample.response_ids)
    room = length < params.max_tokens and len(sample.prompt_ids) + length < context
    return replace(sample, finish="aborted") if sample.finish == "length" and room else sample


def token_counts(samples: Sequence[Sample]) -> list[int]:
    """Prompt and response tokens of each row."""
    return [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]


def metrics_of(samples: Sequence[Sample], earlier: Sequence[int], seconds: float) -> dict[str, float]:
    """Counts add up over replicas, means do over rows; `seconds` is the wall time of this generation.

    Args:
        earlier: response tokens that each row had before.
    """
    lengths = [len(sample.response_ids) for sample in samples]
    made = sum(lengths) - sum(earlier)
    return {
        "seconds": seconds,
        "prompt_tokens": sum(len(sample.prompt_ids) for sample in samples),
        "response_tokens": made,
        "tokens_per_second": made / max(seconds, 1e-9),
        "response_length": float(np.mean(lengths)),
        "response_length_max": max(lengths),
        "response_length_min": min(lengths),
        "truncated_share": float(np.mean([sample.finish == "length" for sample in samples])),
        "logprob": float(np.mean(np.concatenate([sample.logprobs for sample in samples]))),
    }
