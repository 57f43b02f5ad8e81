"""Tiny models and requests for tests of generation."""

import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from services.rollout.backend import Sample, SampleRequest, SamplingParams
from shared.config import RunConfig
from shared.config_loading import load_config

EOS = 2


def tiny_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """llama (grouped heads, tied), qwen2 (biases), gpt2 (learned positions); vocabulary 64, weights from `seed`."""
    small: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": EOS, "initializer_range": 0.2}
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "gpt2":
            model: PreTrainedModel = GPT2LMHeadModel(
                GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **small)
            )
        elif kind == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**small, **shape, num_key_value_heads=2, max_position_embeddings=128))
        else:
            model = LlamaForCausalLM(
                LlamaConfig(
                    **small, **shape, num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True
                )
            )
    return model.eval()


def requests(
    count: int, params: SamplingParams, *, n: int = 2, longest: int = 9, vocabulary: int = 64
) -> list[SampleRequest]:
    """`count` rows, `n` per prompt; prompts of different lengths."""
    rows = []
    for row in range(count):
        prompt = row // n
        ids = tuple((7 * prompt + 5 * k + k * k) % (vocabulary - 4) + 4 for k in range(1 + (3 * prompt) % longest))
        rows.append(SampleRequest(f"p{prompt}", row % n, ids, zlib.crc32(str(row).encode()), params))
    return rows


async def collect(samples: AsyncIterator[Sample]) -> dict[tuple[str, int], Sample]:
    """By row; a row that comes twice is an error."""
    found: dict[tuple[str, int], Sample] = {}
    async for sample in samples:
        assert (sample.uid, sample.sample) not in found
        found[sample.uid, sample.sample] = sample
    return found


def keyed(samples: Sequence[Sample]) -> dict[tuple[str, int], Sample]:
    return {(sample.uid, sample.sample): sample for sample in samples}


def rollout_config(model: Path, *overrides: str, data: str = "none") -> RunConfig:
    """A run on a tiny model; overrides are dotted."""
    tree: dict[str, Any] = {
        "model": {"path": str(model), "device": "cpu"},
        "data": {"path": data, "max_prompt_tokens": 32},
        "reward": {"function": "none:none"},
        "total_steps": 1,
        "rollout": {"n": 2, "max_tokens": 12, "slots": 4, "engine": "hf"},
    }
    return load_config(tree, list(overrides))
