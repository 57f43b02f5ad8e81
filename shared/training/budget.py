"""`micro_batch_tokens: auto`: how many tokens of a pass there is memory for, found by trying a few and drawing a line.

Passes grow until two of them say what a token costs. None is tried that would not fit by what the smaller ones took.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import structlog
import torch

from shared.batch.block import Block, Ragged, RowKey
from shared.config import RunConfig, TrainingConfig

from .device import free_memory
from .models import Policy, ValueModel
from .parallel import Parallel
from .regions import local
from .sequences import collate
from .sharding import device_of

log = structlog.get_logger()
SHARE = {"cuda": 0.8, "cpu": 0.25}
"""Of free memory: beside a model on a CPU its copies live, and mostly the other roles. There the ranks divide it."""
SECONDS = 5.0
"""A pass that takes so long is the last."""
CGROUP = Path("/sys/fs/cgroup")


def sized(training: TrainingConfig, run: RunConfig, model: Policy | ValueModel, parallel: Parallel) -> TrainingConfig:
    """`training` as it can be: packing where the model does that, and a number for micro_batch_tokens=auto.

    What came of auto is logged and kept in `model.budget`. All ranks together; they agree on the smallest.

    Raises:
        MemoryError: there is no memory for one row as long as rows may be.
    """
    training = training.model_copy(update={"packing": not model.padded})
    if training.micro_batch_tokens != "auto":
        return training
    device = device_of(model, parallel)
    share = SHARE[device.type] / (parallel.group.size if device.type == "cpu" else 1)
    free = min(parallel.group.exchange(share * free_bytes(device) - later(model, device)))
    longest = run.rollout.context or run.data.max_prompt_tokens + run.rollout.max_tokens
    most = longest * -(-run.samples_per_step // parallel.dp)
    taken: list[tuple[int, float]] = []
    for rows, length in _sizes(longest, most):
        if len(taken) > 1 and _line(taken)(rows * length) > free:
            break
        peak, seconds = _try(model, _rows(rows, length, run.rollout.max_tokens), device)
        told = parallel.group.exchange((peak, seconds))
        taken.append((rows * length, max(peak for peak, _ in told)))
        if len(taken) > 2 and max(seconds for _, seconds in told) > SECONDS:
            break
    needed = _line(taken)
    if needed(longest) > free:
        raise MemoryError(
            f"micro_batch_tokens=auto: a row of {longest} tokens takes {needed(longest) / 2**30:.2f} GiB of the "
            f"{free / 2**30:.2f} there are: set gradient_checkpointing or parallel.cp, or lower rollout.max_tokens"
        )
    tokens = _rounded(_largest(needed, longest, most, free))
    model.budget = (
        f"auto: {tokens} tokens; {needed(tokens) / 2**30:.2f} GiB of {free / 2**30:.2f}, as {len(taken)} passes say"
    )
    log.info("micro-batch budget", tokens=tokens, bytes=int(needed(tokens)), free=int(free), tried=taken)
    return training.model_copy(update={"micro_batch_tokens": tokens})


def _sizes(longest: int, most: int) -> Iterator[tuple[int, int]]:
    """Rows and their length, ever more: parts of the longest row, then several."""
    for part in (4, 2):
        if longest >= 16 * part:
            yield 1, longest // part
    for rows in itertools.takewhile(lambda rows: rows * longest < 2 * most, (2**k for k in itertools.count())):
        yield rows, longest


def _line(taken: list[tuple[int, float]]) -> Callable[[int], float]:
    """Bytes of a pass with so many tokens, by the steepest step between passes; one pass counts from nothing."""
    slopes = [(b - a) / (m - n) for (n, a), (m, b) in itertools.pairwise(taken)] or [taken[0][1] / taken[0][0]]
    slope, (tokens, bytes_) = max(0.0, *slopes), taken[-1]
    return lambda wanted: max(bytes_ + slope * (wanted - tokens), 0.0)


def _largest(needed: Callable[[int], float], longest: int, most: int, free: float) -> int:
    """The most tokens, a row at least and what a step has at most, that fit."""
    low, high = longest, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= free else (low, middle - 1)
    return low


def _rounded(tokens: int) -> int:
    """To three binary digits, downwards: free memory differs by a little from one start to the next."""
    step = 2 ** max(0, tokens.bit_length() - 3)
    return tokens // step * step


def _rows(rows: int, length: int, max_tokens: int) -> Block:
    response = min(max_tokens, length - 1)
    columns = {
        "prompt_ids": Ragged.from_rows([np.zeros(length - response)] * rows, "int32"),
        "response_ids": Ragged.from_rows([np.zeros(response)] * rows, "int32"),
    }
    return Block(tuple(RowKey(str(row), 0) for row in range(rows)), columns)


def _try(model: Policy | ValueModel, block: Block, device: torch.device) -> tuple[float, float]:
    """Bytes that a pass took at most, with its backward pass where something is trained; and seconds."""
    trained = any(p.requires_grad for p in model.parameters())
    # What the last pass left in the allocator would be taken again unseen.
    free_memory()
    began = time.perf_counter()
    with Peak(device) as peak, torch.set_grad_enabled(trained):
        sequences = collate(block, device)
        result = model(sequences, 1.0).logprobs_BT if isinstance(model, Policy) else model(sequences)
        if trained:
            result.sum().backward()
        del result
    model.zero_grad()
    return peak.bytes, time.perf_counter() - began


class Peak:
    """The most memory that was taken inside, over what had been taken before: `bytes`."""

    def __init__(self, device: torch.device) -> None:
        self.bytes, self._device, self._done = 0.0, device, threading.Event()

    def __enter__(self) -> "Peak":
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._process = psutil.Process()
            self._before = self._process.memory_info().rss
            self._watch = threading.Thread(target=self._look, name="peak", daemon=True)
            self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self.bytes = float(torch.cuda.max_memory_allocated(self._device) - self._before)
            return
        self._done.set()
        self._watch.join()
        self._see()

    def _look(self) -> None:
        while not self._done.wait(0.001):
            self._see()

    def _see(self) -> None:
        self.bytes = max(self.bytes, float(self._process.memory_info().rss - self._before))


def free_bytes(device: torch.device) -> float:
    """Memory that can still be taken: of a GPU, or of this machine and the container's limit."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    limit, used = (CGROUP / "memory.max", CGROUP / "memory.current")
    free = float(psutil.virtual_memory().available)
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, float(text) - float(used.read_text()))
    return free


def later(model: Policy | ValueModel, device: torch.device) -> float:
    """Bytes that the optimizer takes when it begins: two moments, where parameters are on the device that computes."""
    trained = [p for p in model.parameters() if p.requires_grad and p.device.type == device.type]
    return 2.0 * sum(local(p).numel() * p.element_size() for p in trained)
