"""Configurations, samples and scores for tests of the roles that train."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from shared.batch.block import Block, Ragged, RowKey
from shared.config import RunConfig
from shared.config_loading import load_config

EOS = 2


def make_config(model: Path, *overrides: str) -> RunConfig:
    """A run on a tiny model; overrides are dotted."""
    tree: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"path": "none"},
        "reward": {"function": "none:none"},
        "total_steps": 1,
        "rollout": {"n": 2, "max_tokens": 8},
        "actor": {"micro_batch_size": 3, "optimizer": {"lr": 1e-3}},
        "critic": {"micro_batch_size": 3, "optimizer": {"lr": 1e-3}},
    }
    return load_config(tree, list(overrides))


@torch.no_grad()
def roll_out(
    model: Path | Any, prompts: int = 3, n: int = 2, *, step: int = 1, max_tokens: int = 8, temperature: float = 1.0
) -> Block:
    """Samples of a plain Hugging Face model, one row and token at a time; `model` is a directory or a loaded model."""
    lm = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, Path) else model
    rng = torch.Generator().manual_seed(step)
    rows, prompt_ids, response_ids, logprobs = [], [], [], []
    for index in range(prompts):
        prompt = torch.randint(4, 64, (2 + index % 3,), generator=rng)
        for sample in range(n):
            ids, chosen = prompt.clone(), []
            while len(chosen) < max_tokens and not (chosen and ids[-1] == EOS):
                all_V = torch.log_softmax(lm(ids[None]).logits[0, -1].float() / temperature, -1)
                ids = torch.cat([ids, torch.multinomial(all_V.exp(), 1, generator=rng)])
                chosen.append(float(all_V[ids[-1]]))
            rows.append(RowKey(f"{step}:{index}:0", sample))
            prompt_ids.append(prompt.numpy())
            response_ids.append(ids[len(prompt) :].numpy())
            logprobs.append(np.array(chosen))
    return make_block(rows, prompt_ids, response_ids, logprobs)


def make_block(
    rows: Sequence[RowKey],
    prompt_ids: Sequence[np.ndarray],
    response_ids: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
) -> Block:
    """What rollout makes of them, without the text columns."""
    finish = ["stop" if len(ids) and ids[-1] == EOS else "length" for ids in response_ids]
    columns = {
        "prompt_ids": Ragged.from_rows(prompt_ids, "int32"),
        "response_ids": Ragged.from_rows(response_ids, "int32"),
        "response_mask": Ragged.from_rows([np.ones(len(ids)) for ids in response_ids], "uint8"),
        "rollout_logprobs": Ragged.from_rows(logprobs, "float32"),
        "versions": Ragged.from_rows([np.zeros(len(ids)) for ids in response_ids], "int32"),
        "finish": Ragged.from_text(finish),
    }
    return Block(tuple(rows), columns)


def score(samples: Block, grade: Callable[[np.ndarray], float | None]) -> Block:
    """Grades each row's response ids; None is a grade that failed."""
    grades = [grade(ids) for ids in samples["response_ids"].rows()]
    columns = {
        "score": Ragged.from_scalars([np.nan if g is None else g for g in grades], "float32"),
        "valid": Ragged.from_scalars([g is not None for g in grades], "uint8"),
    }
    return Block(samples.rows, columns)


def join(*blocks: Block) -> Block:
    """The columns of all blocks, in the row order of the first."""
    columns: dict[str, Ragged] = {}
    for block in blocks:
        columns |= block.select(blocks[0].rows).columns
    return Block(blocks[0].rows, columns)


def replaced(block: Block, name: str, rows: Sequence[np.ndarray | Sequence[float]] | None) -> Block:
    """The block with another column `name`; None: without it."""
    columns = dict(block.columns)
    if rows is None:
        del columns[name]
    else:
        columns[name] = Ragged.from_rows(rows, columns[name].dtype if name in columns else "float32")
    return Block(block.rows, columns)
