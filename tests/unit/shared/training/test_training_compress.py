"""Activations kept in 8 bits: how far off gradients are, and what is left as it is."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from shared.config import ModelConfig, ParallelConfig, TrainingConfig
from shared.training.compress import BLOCK, Codes, Stored, activations_in_8_bits
from shared.training.engine import Engine
from shared.training.group import ALONE, Group
from shared.training.microbatch import micro_batches
from shared.training.models import Policy
from shared.training.parallel import ONE, Parallel, plan_parallel
from shared.training.pipeline import play
from shared.training.regions import local
from shared.training.sequences import collate
from shared.training.sharding import load_policy
from tests.fakes.ranks import run_ranks
from tests.unit.shared.training.test_training_engine import CPU, likelihood, make_block

BLOCK_OF_ROWS = make_block(9)


@pytest.mark.parametrize("shape", [(3, 7), (BLOCK,), (5, 300), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_is_off_by_half_a_step_of_its_block(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    again = Codes.of(values).values(shape)
    assert again.shape == values.shape
    assert again.dtype == dtype
    rounding = torch.finfo(dtype).eps * values.abs().max() if values.numel() else 0
    for before, after in zip(values.flatten().split(BLOCK), again.flatten().split(BLOCK), strict=True):
        assert not before.numel() or (before - after).abs().max() <= before.abs().max() / 253 + rounding


def test_zeros_stay_zero_and_what_is_not_finite_does_not_hide() -> None:
    assert torch.equal(Codes.of(torch.zeros(9)).values((9,)), torch.zeros(9))
    for bad in (torch.inf, torch.nan):
        assert not torch.isfinite(Codes.of(torch.tensor([1.0, bad])).values((2,))).all()


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write in whole tensors; views and new memory are free."""

    def __init__(self, whole: int) -> None:
        super().__init__()
        self.whole, self.moved = whole, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            touched = {id(t): t for t in tree_leaves((args, kwargs, made)) if isinstance(t, Tensor)}
            self.moved += sum(t.nbytes for t in touched.values() if t.numel() >= self.whole)
        return made


@pytest.mark.parametrize(("dtype", "pack", "unpack"), [(torch.bfloat16, 13, 3), (torch.float32, 21, 5)])
def test_a_tensor_is_packed_in_four_passes_and_unpacked_in_one(dtype: torch.dtype, pack: int, unpack: int) -> None:
    values = torch.randn(7, BLOCK, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    with Traffic(values.numel()) as packing:
        codes = Codes.of(values)
    with Traffic(values.numel()) as unpacking:
        codes.values(values.shape)
    assert packing.moved == pack * values.numel()
    assert unpacking.moved == unpack * values.numel()


def test_other_orders_of_a_tensors_dimensions_are_stored_with_it_and_come_back_as_they_lay() -> None:
    x_BHSK = torch.randn(2, 50, 3, 8).transpose(1, 2).requires_grad_()
    with activations_in_8_bits(nn.Linear(1, 1), tokens=100, head_dim=1):
        outputs = x_BHSK.sin(), x_BHSK.transpose(1, 2).reshape(100, 24).cos(), x_BHSK[:, :, ::2].exp().sin()
    one, same, other = (next(one for one in saved(output) if isinstance(one, Stored)) for output in outputs)
    assert one.codes is same.codes is not other.codes
    assert one.tensor().stride() == x_BHSK.stride()
    assert torch.equal(one.tensor().transpose(1, 2).reshape(100, 24), same.tensor())
    assert (one.tensor() - x_BHSK).abs().max() <= x_BHSK.abs().max() / 253
    assert (other.tensor() - x_BHSK[:, :, ::2].exp()).abs().max() <= x_BHSK.exp().max() / 253


def test_a_tensor_is_stored_once_and_parameters_never() -> None:
    layers = nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])
    x_BSD = torch.randn(2, 50, 8, requires_grad=True)
    with activations_in_8_bits(layers, tokens=100, head_dim=2):
        outputs = [layer(x_BSD) for layer in layers]
    kept = [node for output in outputs for node in saved(output)]
    stored = [one for one in kept if isinstance(one, Stored)]
    assert len(stored) == 3
    assert len({id(one.codes) for one in stored}) == 1
    assert {tuple(one.shape) for one in kept if isinstance(one, Tensor)} <= {(4, 8), (8, 4)}


def saved(output: Tensor) -> list[Any]:
    """What the hooks made of the tensors that the operations up to `output` saved."""
    found, todo = [], [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None:
            continue
        found += [getattr(node, name).data for name in dir(node) if name.startswith("_raw_saved")
                  and hasattr(getattr(node, name), "data")]  # fmt: skip
        todo += [following for following, _ in node.next_functions]
    return found


def gradient(policy: Policy, parallel: Parallel = ONE) -> Tensor:
    policy.zero_grad()
    micros = list(micro_batches(BLOCK_OF_ROWS, 4))

    def loss(place: int) -> Tensor:
        return -policy(collate(micros[place], CPU), 0.9).logprobs_BT.sum()

    if parallel.pp > 1:
        play(policy, micros, loss, parallel, train=True)
    else:
        for place in range(len(micros)):
            loss(place).backward()
    return torch.cat([local(p.grad).flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("packing", [True, False])
def test_gradients_are_off_by_less_than_a_fiftieth_and_log_probs_not_at_all(tiny_llama: Path, packing: bool) -> None:
    plain, small = (
        load_policy(ModelConfig(path=str(tiny_llama)), TrainingConfig(packing=packing, eight_bit_activations=eight_bit))
        for eight_bit in (False, True)
    )
    a, b = (policy(collate(BLOCK_OF_ROWS, CPU), 0.9).logprobs_BT for policy in (plain, small))
    assert torch.equal(a, b)
    wanted = gradient(plain)
    assert 0 < torch.linalg.norm(gradient(small) - wanted) < 0.02 * torch.linalg.norm(wanted)


def test_training_still_raises_the_likelihood(tiny_llama: Path) -> None:
    config = TrainingConfig(eight_bit_activations=True).model_copy(
        update={"optimizer": TrainingConfig().optimizer.model_copy(update={"lr": 1e-2})}
    )
    policy = load_policy(ModelConfig(path=str(tiny_llama)), config)
    engine = Engine(policy, config, seed=3, norm_length=16)
    losses = [engine.update(BLOCK_OF_ROWS, likelihood(policy, "token-mean"), step=step)["loss"] for step in range(5)]
    assert losses[-1] < 0.8 * losses[0]


def test_it_excludes_checkpointing() -> None:
    with pytest.raises(ValidationError, match="gradient_checkpointing keeps none of what eight_bit_activations"):
        TrainingConfig(eight_bit_activations=True, gradient_checkpointing=True)


def on_rank(group: Group, job: dict[str, Any]) -> list[float]:
    """Norms of the difference that 8 bits make to this rank's part of the gradient, and of that part."""
    parallel = plan_parallel(ParallelConfig(**job["parallel"]), group, "actor.parallel")
    policy = load_policy(ModelConfig(path=job["model"]), TrainingConfig(eight_bit_activations=True), parallel)
    eight_bit = gradient(policy, parallel)
    policy.in_8_bits = False
    exact = gradient(policy, parallel)
    return [float(torch.linalg.norm(eight_bit - exact)), float(torch.linalg.norm(exact))]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "parallel", [{"tp": 2}, {"dp": 2}, {"cp": 2}, {"pp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}]
)
def test_on_ranks_too(tmp_path: Path, parallel: dict[str, int]) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    # How far off gradients are differs by a third between models.
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    job = {"model": str(tmp_path), "parallel": parallel}
    size = math.prod(parallel.values())
    ranks = run_ranks("tests.unit.shared.training.test_training_compress:on_rank", size, job)
    off, whole = (math.hypot(*norms) for norms in zip(*ranks, strict=True))
    (alone_off, alone_whole) = on_rank(ALONE, {**job, "parallel": {}})
    assert 0 < off < 0.02 * whole
    assert off / whole < 1.25 * alone_off / alone_whole
