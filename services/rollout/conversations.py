"""Generate in a run whose samples are conversations of agents (`rollout.agents`)."""

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from services.rollout.backend import SampleRequest
from services.rollout.kept import KeptSamples, Place
from services.rollout.openai.sessions import block_of
from services.rollout.samples import Generated, oldest_of, together, token_counts
from services.rollout.tasks import Task, Tasks
from shared.batch import columns
from shared.batch.block import Block
from shared.batch.columns import RowKey
from shared.data.datasets import PromptExample
from shared.failpoints import hit_async
from shared.gen.sextet.v1 import rollout_pb2

AGENT = "agent"
"""Where graders find in extra_info what the agent said: {"reward": number or null, "turns": count}."""


class Conversations:
    """Offers rows as tasks and makes samples of the conversations about them."""

    def __init__(self, tasks: Tasks, kept: KeptSamples) -> None:
        self._tasks, self._kept = tasks, kept

    async def generate(
        self,
        request: rollout_pb2.GenerateRequest,
        place: Place,
        rows: Sequence[tuple[SampleRequest, PromptExample]],
        tokenizer: Any,
        patience: float,
    ) -> Generated:
        """The rows' conversations, in their order; one that became several rows has them one after the other.

        Args:
            rows: what to make, and of what.
            patience: see Tasks.play.

        Raises:
            EngineError: see Tasks.play.
        """
        started = time.monotonic()
        tasks = [_task(row, example, request) for row, example in rows]
        keys = [task.key for task in tasks]
        made = {} if request.validation else await self._kept.conversations(place, keys, request)
        left = [task for task in tasks if task.key not in made]
        async with contextlib.aclosing(self._tasks.play(left, patience)) as ended:
            async for task in ended:
                made[task.key] = await asyncio.to_thread(sample_of, task, tokenizer)
                if not request.validation:
                    await self._kept.keep(place, made[task.key])
                await hit_async("rollout.sample")
        block = await asyncio.to_thread(together, [made[key] for key in keys])
        metrics = metrics_of(block, time.monotonic() - started)
        return Generated(block, token_counts(block), metrics, oldest_of(block, place.version), cut=[])


def sample_of(task: Task, tokenizer: Any) -> Block:
    """The rows of a task's conversation, with what its agent said for graders."""
    session = task.session
    assert session is not None
    said = {"reward": session.reward, "turns": len(session.turns)}
    session.extra_info = json.dumps({**json.loads(task.example.extra_info), AGENT: said})
    return block_of([session], tokenizer).select(None, columns.SAMPLE_COLUMNS)


def metrics_of(block: Block, seconds: float) -> dict[str, float]:
    """As samples.metrics_of, of what the policy said; `split_rows` are those that rewritten history cost."""
    masks = [mask.astype(bool) for mask in block[columns.RESPONSE_MASK].rows()]
    said = [int(mask.sum()) for mask in masks]
    logprobs = [values[mask] for values, mask in zip(block[columns.ROLLOUT_LOGPROBS].rows(), masks, strict=True)]
    infos = zip(block.rows, block[columns.EXTRA_INFO].texts(), strict=True)
    turns = {(key.prompt, key.sample): json.loads(info)[AGENT]["turns"] for key, info in infos}
    return {
        "seconds": seconds,
        "prompt_tokens": int(block[columns.PROMPT_IDS].lengths.sum()),
        "given_tokens": int(block[columns.RESPONSE_IDS].lengths.sum()) - sum(said),
        "response_tokens": sum(said),
        "tokens_per_second": sum(said) / max(seconds, 1e-9),
        "response_length": float(np.mean(said)),
        "response_length_max": max(said),
        "response_length_min": min(said),
        "truncated_share": float(np.mean([finish == "length" for finish in block[columns.FINISH].texts()])),
        "logprob": float(np.mean(np.concatenate(logprobs))),
        "turns": float(np.mean(list(turns.values()))),
        "split_rows": len(block) - len(turns),
    }


def _task(row: SampleRequest, example: PromptExample, request: rollout_pb2.GenerateRequest) -> Task:
    return Task(RowKey(row.uid, row.sample), example, row.seed, request.greedy, request.validation)
