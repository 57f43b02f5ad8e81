"""One update of a model: epochs over mini-batches over micro-batches, applied completely or not at all."""

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from shared.algo import Totals, combine_metrics, finish_metrics
from shared.batch.block import Block, Ragged, RowKey
from shared.batch.codec import from_bytes, to_bytes
from shared.batch.columns import RESPONSE_MASK
from shared.config import TrainingConfig
from shared.failpoints import hit

from .errors import HalfStepError, NonFiniteError
from .flops import Work, peak_flops
from .microbatch import Share, enough_memory, mini_batches, my_micro_batches, row_totals, rows_of
from .models import Policy, ValueModel
from .optimizer import Optimizer
from .parallel import ONE, Parallel
from .pipeline import play
from .regions import local
from .scorer import Scorer
from .sequences import row_lengths, trainable
from .sharding import device_of, synchronise_on

Loss = Callable[[Block, Totals], tuple[Tensor, dict[str, Tensor]]]
"""A micro-batch's share of the mini-batch loss (shares add up) and its metrics (see shared/algo/metrics.py)."""
Prepare = Callable[[Block, int], Block]
"""A mini-batch and its epoch, before it is split: adds columns that need all of its rows."""


Model = TypeVar("Model", bound=nn.Module)


class Engine(Generic[Model]):
    """A model and its optimizer."""

    def __init__(
        self, model: Model, config: TrainingConfig, *, seed: int, norm_length: int, parallel: Parallel = ONE
    ) -> None:
        """`norm_length` is the constant length of the seq-mean-token-sum-norm aggregation: the run's max_tokens."""
        self.model, self.config, self.seed, self.norm_length = model, config, seed, norm_length
        self.parallel = parallel
        self.optimizer = Optimizer(model, config.optimizer, parallel)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return device_of(self.model, self.parallel)

    def update(
        self, block: Block, loss: Loss, *, step: int, prepare: Prepare | None = None, outline: Block | None = None
    ) -> dict[str, float]:
        """Trains on a training block, every row of which has at least one token in its `response_mask`.

        Args:
            step: the flow step, for the order of rows.
            outline: in a group, where `block` holds the rows of `my_rows` only: all rows, with `response_mask` and
                `tokens`.

        Returns:
            Metrics: means over the optimizer steps, extremes over all of them for names in _max and _min.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite; model and optimizer are as before the call.
            HalfStepError: the only optimizer step failed while it changed parameters, or several could not be undone.
        """
        began, history = time.perf_counter(), []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        whole = block if outline is None else outline
        steps = self.config.epochs * math.ceil(len(whole) / (self.config.mini_batch_size or len(whole)))
        # A single optimizer step checks its gradients before it changes anything and needs no copy to go back to.
        guard = all_or_nothing(self.model, self.optimizer) if steps > 1 else contextlib.nullcontext()
        with guard:
            for mini, epoch in self._minis(whole, step):
                mini = prepare(mini, epoch) if prepare else mini
                history.append(self._step(mini, mini if outline is None else block, loss))
        hit("training.applied")
        tokens, seconds = sum(row_totals(whole).values()) * self.config.epochs, time.perf_counter() - began
        work = {"rows": len(whole), "optimizer_steps": steps, "tokens": tokens, "tokens_per_second": tokens / seconds}
        return {**_over_steps(history), **work, "seconds": seconds, **self._use_of_device(whole, seconds)}

    def _use_of_device(self, whole: Block, seconds: float) -> dict[str, float]:
        """MFU over all ranks, and the most memory that this one had allocated during the update."""
        if self.device.type != "cuda":
            return {}
        used = {"memory_peak_gib": torch.cuda.max_memory_allocated(self.device) / 2**30}
        model: nn.Module = self.model
        if isinstance(model, Policy | ValueModel) and (peak := peak_flops(self.device, model.dtype)):
            responses = int(whole[RESPONSE_MASK].lengths.sum())
            operations = 3 * self.config.epochs * Work(model).forward([*row_totals(whole).values()], responses)
            operations = sum(self.parallel.group.exchange(operations)[:: self.parallel.each])
            used["mfu"] = operations / seconds / peak / self.parallel.group.size
        return used

    def my_rows(self, outline: Block, step: int | None) -> list[RowKey]:
        """The rows of `outline` that this rank computes: in the update of a step, or (None) when they are scored."""
        if step is None:
            return rows_of(my_shares(outline, self.config, self.parallel))
        minis = [mini for mini, _ in self._minis(outline.select(trainable(outline)), step)]
        return rows_of([share for mini in minis for share in my_shares(mini, self.config, self.parallel)])

    def _minis(self, block: Block, step: int) -> Iterator[tuple[Block, int]]:
        """Mini-batches and their epochs."""
        for epoch in range(self.config.epochs):
            for mini in mini_batches(block, self.config.mini_batch_size, seed=self.seed, step=step, epoch=epoch):
                yield mini, epoch

    def _step(self, mini: Block, source: Block, loss: Loss) -> dict[str, float]:
        """One optimizer step on the rows of `mini`, whose columns are in `source`."""
        totals = count(mini, self.norm_length)
        amounts, parts = [], []
        shares = my_shares(mini, self.config, self.parallel)
        micros = [rows if source is mini else source.select(rows.rows) for rows, _ in shares]

        def forward(place: int) -> Tensor:
            share, metrics = loss(micros[place], totals)
            amount = float(share.detach())
            # In a group every rank has to come to the exchange, where all of them see that the sum is not finite.
            if not math.isfinite(amount) and self.parallel.group.size == 1:
                raise NonFiniteError(f"the loss is {amount} at optimizer step {self.optimizer.steps + 1}")
            if shares[place].counts:
                amounts.append(amount)
                parts.append({name: metric.detach() for name, metric in metrics.items()})
            return share if shares[place].counts else share * 0

        try:
            if self.parallel.pp > 1:
                assert isinstance(self.model, Scorer)
                play(self.model, micros, forward, self.parallel, train=True)
            else:
                for place, micro in enumerate(micros):
                    synchronise_on(self.model, place == len(micros) - 1, self.parallel)
                    with enough_memory(micro):
                        forward(place).backward()
            value, combined = self._all_parts(sum(amounts), combine_metrics(parts))
            hit("training.step")
            norm, lr = self.optimizer.step()
        finally:
            self.optimizer.clear()
        return {"loss": value, "grad_norm": norm, "lr": lr, **finish_metrics(combined, totals)}

    def _all_parts(self, value: float, combined: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Loss and metrics of this rank's micro-batches put together with those of the others."""
        if self.parallel.group.size == 1:
            return value, combined
        mine = value, {name: float(metric) for name, metric in combined.items()}
        told = self.parallel.group.exchange(mine)[self.parallel.telling]
        value = sum(loss for loss, _ in told)
        if not math.isfinite(value):
            raise NonFiniteError(f"the loss is {value} at optimizer step {self.optimizer.steps + 1}")
        parts = [{name: torch.tensor(metric, dtype=torch.float64) for name, metric in each.items()} for _, each in told]
        return value, combine_metrics(parts)


def my_shares(block: Block, config: TrainingConfig, parallel: Parallel) -> list[Share]:
    """The micro-batches of `block` that this rank computes."""
    size, tokens = config.micro_batch_size, config.micro_batch_tokens
    if tokens == "auto":
        raise AssertionError("micro_batch_tokens=auto is made a number by budget.sized")
    return my_micro_batches(block, size, tokens, rank=parallel.dp_rank, ranks=parallel.dp, packed=config.packing)


def count(block: Block, norm_length: int) -> Totals:
    """The counts that a mini-batch's loss is divided by: they don't depend on how it is split."""
    per_row = [int(np.count_nonzero(mask)) for mask in block[RESPONSE_MASK].rows()]
    return Totals(sum(per_row), sum(n > 0 for n in per_row), norm_length)


@torch.no_grad()
def map_rows(
    block: Block,
    config: TrainingConfig,
    compute: Callable[[Block], Sequence[Tensor]],
    parallel: Parallel = ONE,
    outline: Block | None = None,
    model: Scorer | None = None,
) -> list[Ragged]:
    """Computes per-token columns, a micro-batch at a time, without gradients.

    Args:
        compute: a micro-batch to tensors [B, T] over response tokens.
        outline: in a group, where `block` holds this rank's rows only: all rows, with `tokens`.
        model: what `compute` calls; needed where it is cut into stages, as only the last one computes columns.

    Returns:
        One float32 column for each tensor that `compute` gives, for all rows in the block's (the outline's) order.
    """
    whole = block if outline is None else outline
    results: dict[RowKey, list[np.ndarray]] = {}
    shares = my_shares(whole, config, parallel)
    micros = [rows if outline is None else block.select(rows.rows) for rows, _ in shares]

    def score(place: int) -> None:
        arrays = [tensor_BT.float().cpu().numpy() for tensor_BT in compute(micros[place])]
        for row, (key, length) in enumerate(zip(micros[place].rows, row_lengths(micros[place])[1], strict=True)):
            if shares[place].counts:
                results[key] = [array_BT[row, :length] for array_BT in arrays]

    if parallel.pp > 1:
        assert model is not None
        play(model, micros, score, parallel, train=False)
    else:
        for place, micro in enumerate(micros):
            with enough_memory(micro):
                score(place)
    if parallel.group.size > 1:
        results = _of_all_ranks(results, parallel)
    return [Ragged.from_rows(rows, "float32") for rows in zip(*(results[key] for key in whole.rows), strict=True)]


def _of_all_ranks(mine: dict[RowKey, list[np.ndarray]], parallel: Parallel) -> dict[RowKey, list[np.ndarray]]:
    """The rows that all ranks computed, on each of them."""
    columns = [Ragged.from_rows(rows, "float32") for rows in zip(*mine.values(), strict=True)]
    block = Block(tuple(mine), {str(number): column for number, column in enumerate(columns)})
    results = {}
    for data in parallel.group.gather(to_bytes(block))[parallel.telling]:
        other = from_bytes(data)
        rows = zip(*(column.rows() for column in other.columns.values()), strict=True)
        results |= {key: list(row) for key, row in zip(other.rows, rows, strict=False)}
    return results


@contextlib.contextmanager
def all_or_nothing(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Puts model and optimizer back if the body raises. Costs a copy of both in main memory.

    Raises:
        HalfStepError: they could not be put back.
    """
    parameters = [local(p.detach()).to("cpu", copy=True) for p in model.parameters()]
    state = {name: local(t.detach()).to("cpu", copy=True) for name, t in optimizer.state().items()}
    steps = optimizer.steps
    try:
        yield
    except BaseException as error:
        _let_go(error)
        try:
            with torch.no_grad():
                for p, before in zip(model.parameters(), parameters, strict=True):
                    local(p).copy_(before)
            optimizer.load_state(state, steps)
        except Exception as another:
            raise HalfStepError(f"a step failed ({error}) and could not be undone: {another}") from another
        # What was half done is undone: what is left to say is why.
        if isinstance(error, HalfStepError) and error.__cause__ is not None:
            raise error.__cause__ from None
        raise


def _let_go(error: BaseException | None) -> None:
    """Drops what the frames of an error held, as what was computed last would take the room of what comes next."""
    seen: set[int] = set()
    # Errors may be each other's causes (pipeline.py says torch's in its own words).
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _over_steps(history: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as one."""
    merged = {}
    for name in history[0]:
        values = [metrics[name] for metrics in history]
        extreme = {"max": max, "min": min}.get(name.rpartition("_")[2])
        merged[name] = extreme(values) if extreme else sum(values) / len(values)
    return {**merged, "lr": history[-1]["lr"]}
