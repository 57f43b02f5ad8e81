"""Samples as a block of columns, and the numbers of a generation."""

from collections.abc import Mapping, Sequence
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
    samples: Sequence[Sample], examples: Mapping[RowKey, PromptExample], tokenizer: Any, params: SamplingParams
) -> Block:
    """One row per sample, in this order; `examples` are the dataset rows they answer."""
    keys = tuple(RowKey(sample.uid, sample.sample) for sample in samples)
    answered = [examples[key] for key in keys]
    texts = {
        columns.PROMPT_JSON: [example.prompt_json for example in answered],
        columns.RESPONSE: response_texts(tokenizer, samples, params),
        columns.DATA_SOURCE: [example.data_source for example in answered],
        columns.GROUND_TRUTH: [example.ground_truth for example in answered],
        columns.EXTRA_INFO: [example.extra_info for example in answered],
        columns.FINISH: [sample.finish for sample in samples],
    }
    found = {
        **earlier_of(samples),
        # The stop token was sampled like any other: it is trained, too.
        columns.RESPONSE_MASK: Ragged.from_rows([np.ones(len(sample.response_ids)) for sample in samples], "uint8"),
        **{name: Ragged.from_text(text) for name, text in texts.items()},
    }
    return Block(keys, found)


def together(blocks: Sequence[Block]) -> Block:
    """The blocks' rows as one block; they have the same columns."""
    found = {name: Ragged.together([block[name] for block in blocks]) for name in blocks[0].columns}
    return Block(tuple(key for block in blocks for key in block.rows), found)


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


def token_counts(block: Block) -> list[int]:
    """Prompt and response tokens of each row."""
    return (block[columns.PROMPT_IDS].lengths + block[columns.RESPONSE_IDS].lengths).tolist()


def oldest_of(block: Block, version: int) -> list[int]:
    """Of each row, the oldest version among its tokens; `version` where it has none."""
    return [int(versions.min()) if versions.size else version for versions in block[columns.VERSIONS].rows()]


def cut_of(block: Block) -> list[int]:
    """Places of the rows that a budget cut, or an abort."""
    return [place for place, finish in enumerate(block[columns.FINISH].texts()) if finish == "aborted"]


def metrics_of(block: Block, earlier: int, seconds: float) -> dict[str, float]:
    """Counts add up over replicas, means do over rows; `seconds` is the wall time of this generation.

    Args:
        earlier: response tokens that the rows had before.
    """
    lengths = block[columns.RESPONSE_IDS].lengths
    made = int(lengths.sum()) - earlier
    return {
        "seconds": seconds,
        "prompt_tokens": int(block[columns.PROMPT_IDS].lengths.sum()),
        "response_tokens": made,
        "tokens_per_second": made / max(seconds, 1e-9),
        "response_length": float(np.mean(lengths)),
        "response_length_max": int(lengths.max()),
        "response_length_min": int(lengths.min()),
        "truncated_share": float(np.mean([finish == "length" for finish in block[columns.FINISH].texts()])),
        "logprob": float(np.mean(block[columns.ROLLOUT_LOGPROBS].data, dtype=np.float64)),
    }
