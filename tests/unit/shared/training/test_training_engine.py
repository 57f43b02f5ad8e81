"""An update's gradients do not depend on how the batch is split; a refused update changes nothing."""

import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.algo import Totals, aggregate
from shared.batch.block import Block, Ragged, RowKey
from shared.config import ModelConfig, OptimizerConfig, TrainingConfig
from shared.training.engine import Engine, all_or_nothing, map_rows
from shared.training.errors import HalfStepError, NonFiniteError
from shared.training.microbatch import micro_batches, mini_batches, row_totals
from shared.training.models import Policy, load_policy
from shared.training.sequences import collate

CPU = torch.device("cpu")
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def make_block(rows: int = 7, seed: int = 0) -> Block:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, rows)
    masks = [rng.integers(0, 2, length) for length in lengths]
    for mask in masks:
        mask[0] = 1
    columns = {
        "prompt_ids": Ragged.from_rows([rng.integers(0, 64, n) for n in rng.integers(1, 6, rows)], "int32"),
        "response_ids": Ragged.from_rows([rng.integers(0, 64, n) for n in lengths], "int32"),
        "response_mask": Ragged.from_rows(masks, "uint8"),
    }
    return Block(tuple(RowKey(f"1:{index // 2}:0", index % 2) for index in range(rows)), columns)


def likelihood(policy: Policy, mode: str) -> Callable[[Block, Totals], tuple[Tensor, dict[str, Tensor]]]:
    """The negative log-likelihood, aggregated."""

    def loss(micro: Block, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_BT = policy(collate(micro, CPU), 1.0).logprobs_BT
        mask_BT = torch.zeros(logprobs_BT.shape, dtype=torch.bool)
        for row, mask in enumerate(micro["response_mask"].rows()):
            mask_BT[row, : len(mask)] = torch.tensor(mask).bool()
        valid_B = torch.ones(len(micro), dtype=torch.bool)
        metrics = {"nll_sum": -(logprobs_BT * mask_BT).sum(), "logprob_min": logprobs_BT.min()}
        return aggregate(-logprobs_BT, mask_BT, valid_B, mode, totals), metrics

    return loss


def engine(path: Path, *, lr: float = 0.0, **training: object) -> Engine[Policy]:
    policy = load_policy(ModelConfig(path=str(path))).double()
    config = TrainingConfig(optimizer=OptimizerConfig(lr=lr, clip_grad=0.0), **training)  # type: ignore[arg-type]
    return Engine(policy, config, seed=3, norm_length=16)


def moments(of: Engine[Policy]) -> Tensor:
    """After one step from nothing, the first moment is 0.1 times the gradient."""
    return torch.cat([t.flatten() for name, t in of.optimizer.state().items() if name.startswith("exp_avg/")])


@pytest.mark.parametrize("mode", MODES)
def test_gradients_do_not_depend_on_micro_batches_or_row_order(tiny_llama: Path, mode: str) -> None:
    block, results, losses = make_block(), [], []
    splits: list[dict[str, object]] = [{"micro_batch_size": size} for size in (7, 1, 2, 4)]
    splits += [{"micro_batch_tokens": tokens} for tokens in (1, 20, 1000)]
    for split in splits:
        for rows in (block.rows, block.rows[::-1]):
            one = engine(tiny_llama, **split)
            metrics = one.update(block.select(rows), likelihood(one.model, mode), step=1)
            results.append(moments(one))
            losses.append(metrics["loss"])
    for result, loss in zip(results, losses, strict=True):
        assert torch.linalg.norm(result - results[0]) <= 1e-6 * torch.linalg.norm(results[0])
        assert loss == pytest.approx(losses[0], rel=1e-6)
    assert torch.linalg.norm(results[0]) > 1e-3


def test_weights_after_several_mini_batches_do_not_depend_on_micro_batches_or_row_order(tiny_llama: Path) -> None:
    block, weights = make_block(), []
    for size in (1, 2, 8):
        for rows in (block.rows, block.rows[::-1]):
            one = engine(tiny_llama, lr=1e-3, micro_batch_size=size, mini_batch_size=3, epochs=2)
            metrics = one.update(block.select(rows), likelihood(one.model, "token-mean"), step=1)
            weights.append(torch.cat([p.detach().flatten() for p in one.model.parameters()]))
            assert metrics["optimizer_steps"] == 6 == one.optimizer.steps
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-6, atol=1e-9)


def test_training_raises_the_likelihood_and_reports_its_work(tiny_llama: Path) -> None:
    block, one = make_block(), engine(tiny_llama, lr=1e-2, micro_batch_size=4)
    history = [one.update(block, likelihood(one.model, "token-mean"), step=step) for step in range(5)]
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    assert history[0]["nll"] == pytest.approx(history[0]["loss"])
    assert history[0]["tokens"] == block["prompt_ids"].data.size + block["response_ids"].data.size
    assert history[0]["lr"] == 1e-2
    assert history[0]["grad_norm"] > 0
    assert history[0]["tokens_per_second"] > 0


@pytest.mark.parametrize("mini_batch_size", [None, 2])
@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_refused_update_changes_nothing(tiny_llama: Path, mini_batch_size: int | None, poison: str) -> None:
    """The poisoned row comes late: with several mini-batches, steps were taken before it."""
    block, one = make_block(), engine(tiny_llama, lr=1e-2, micro_batch_size=2, mini_batch_size=mini_batch_size)
    one.update(block, likelihood(one.model, "token-mean"), step=1)
    last = list(mini_batches(block, mini_batch_size, seed=3, step=2, epoch=0))[-1].rows[-1]
    plain = likelihood(one.model, "token-mean")

    def loss(micro: Block, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        share, metrics = plain(micro, totals)
        if last not in micro.rows:
            return share, metrics
        # The square root of 0 is finite; its slope is not.
        return (share * torch.nan if poison == "loss" else share + (share * 0).sqrt()), metrics

    parameters = [p.detach().clone() for p in one.model.parameters()]
    state, steps = {name: t.clone() for name, t in one.optimizer.state().items()}, one.optimizer.steps
    with pytest.raises(NonFiniteError, match="optimizer step"):
        one.update(block, loss, step=2)
    assert all(torch.equal(a, b) for a, b in zip(parameters, one.model.parameters(), strict=True))
    assert all(torch.equal(t, one.optimizer.state()[name]) for name, t in state.items())
    assert one.optimizer.steps == steps
    assert all(p.grad is None for p in one.model.parameters())


def test_what_is_undone_needs_no_memory_for_second_moments(tiny_llama: Path) -> None:
    """Neither for them nor for what the step that failed had computed."""
    one, held = engine(tiny_llama, lr=1e-2), []
    one.update(make_block(), likelihood(one.model, "token-mean"), step=1)
    moments = {name: t.data_ptr() for name, t in one.optimizer.state().items()}
    load = one.optimizer.load_state

    def body() -> None:
        for tensor in one.optimizer.state().values():
            tensor.add_(1)
        activations = torch.ones(3)
        held.append(weakref.ref(activations))
        try:
            raise torch.OutOfMemoryError("none left")
        except torch.OutOfMemoryError as error:
            raise MemoryError("too many rows") from error

    def after(*state: Any) -> None:
        assert held[0]() is None
        load(*state)

    one.optimizer.load_state = after
    with pytest.raises(MemoryError), all_or_nothing(one.model, one.optimizer):
        body()
    assert {name: t.data_ptr() for name, t in one.optimizer.state().items()} == moments
    assert all(float(t) == 1 for name, t in one.optimizer.state().items() if name.startswith("step/"))


def test_errors_that_are_each_others_causes_are_let_go_of_once(tiny_llama: Path) -> None:
    one = engine(tiny_llama, lr=1e-2)

    def forward() -> None:
        try:
            raise MemoryError("too many rows")
        except MemoryError as error:
            raise RuntimeError("torch's own words") from error

    def body() -> None:
        try:
            forward()
        except RuntimeError as error:
            raise error.__cause__ or error from None

    with pytest.raises(MemoryError), all_or_nothing(one.model, one.optimizer):
        body()


def test_what_cannot_be_undone_is_not_said_to_be(tiny_llama: Path, monkeypatch) -> None:
    one = engine(tiny_llama, lr=1e-2)
    monkeypatch.setattr(one.optimizer, "load_state", lambda *_: 1 / 0)
    said = r"too many rows.*could not be undone: division"
    with pytest.raises(HalfStepError, match=said), all_or_nothing(one.model, one.optimizer):
        raise MemoryError("too many rows")


def test_mini_batches_hold_every_row_once_and_depend_on_seeds_only() -> None:
    block = make_block(10)
    minis = list(mini_batches(block, 4, seed=1, step=2, epoch=0))
    assert [len(mini) for mini in minis] == [4, 4, 2]
    assert sorted(key for mini in minis for key in mini.rows) == sorted(block.rows)
    turned = list(mini_batches(block.select(block.rows[::-1]), 4, seed=1, step=2, epoch=0))
    assert [mini.rows for mini in turned] == [mini.rows for mini in minis]
    for other in (
        {"seed": 2, "step": 2, "epoch": 0},
        {"seed": 1, "step": 3, "epoch": 0},
        {"seed": 1, "step": 2, "epoch": 1},
    ):
        assert [mini.rows for mini in mini_batches(block, 4, **other)] != [mini.rows for mini in minis]
    assert [len(mini) for mini in mini_batches(block, None, seed=1, step=2, epoch=0)] == [10]


def test_micro_batches_hold_every_row_once_the_longest_first() -> None:
    block = make_block(10)
    micros = list(micro_batches(block, 3))
    assert [len(micro) for micro in micros] == [3, 3, 3, 1]
    assert sorted(key for micro in micros for key in micro.rows) == sorted(block.rows)
    lengths = [int(n) for micro in micros for n in micro["prompt_ids"].lengths + micro["response_ids"].lengths]
    assert lengths == sorted(lengths, reverse=True)


def test_micro_batches_by_tokens_fill_their_budget_and_never_exceed_it() -> None:
    block = make_block(40)
    totals = row_totals(block)
    for budget in (1, 12, 30, 100, 10_000):
        micros = list(micro_batches(block, 3, budget))
        order = sorted(block.rows, key=lambda key: (-totals[key], key))
        assert [key for micro in micros for key in micro.rows] == order
        for micro in micros:
            longest = max(totals[key] for key in micro.rows)
            assert len(micro) == 1 or len(micro) * longest <= budget
            if micro is not micros[-1]:
                assert (len(micro) + 1) * longest > budget, "one more row would have fitted"


def test_without_padding_the_budget_is_of_the_rows_own_tokens() -> None:
    block = make_block(40)
    totals = row_totals(block)
    for budget in (1, 12, 30, 100, 10_000):
        micros = list(micro_batches(block, 3, budget, packed=True))
        assert [key for micro in micros for key in micro.rows] == sorted(block.rows, key=lambda k: (-totals[k], k))
        for micro, following in itertools.pairwise(micros):
            tokens = sum(totals[key] for key in micro.rows)
            assert len(micro) == 1 or tokens <= budget
            assert tokens + totals[following.rows[0]] > budget, "one more row would have fitted"
        assert len(micros) <= len(list(micro_batches(block, 3, budget)))


@pytest.mark.parametrize(
    ("rows", "want"),
    [(4, r"lower micro_batch_size to 2 \(or set micro_batch_tokens to \d+\): .* of 4 x \d+ tokens does not fit: none"),
     (1, "its only row is too long: set gradient_checkpointing")],
)  # fmt: skip
def test_out_of_memory_says_what_to_lower_and_changes_nothing(tiny_llama: Path, rows: int, want: str) -> None:
    block, one = make_block(rows), engine(tiny_llama, lr=1e-2)
    before = [p.detach().clone() for p in one.model.parameters()]

    def loss(micro: Block, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        raise torch.OutOfMemoryError("none left\nmore")

    with pytest.raises(MemoryError, match=want):
        one.update(block, loss, step=1)
    with pytest.raises(MemoryError, match=want):
        map_rows(block, TrainingConfig(micro_batch_size=rows), lambda micro: [loss(micro, Totals(1, 1, 1))[0]])
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))
