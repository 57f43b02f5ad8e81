"""micro_batch_tokens=auto: as many tokens as memory has room for, found without running out of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.batch.block import Block
from shared.config import ModelConfig, RunConfig
from shared.training import budget
from shared.training.budget import Peak, free_bytes, sized
from shared.training.export import describe
from shared.training.microbatch import row_totals
from shared.training.models import Policy
from shared.training.parallel import ONE
from shared.training.sharding import load_policy, load_value_model
from tests.fakes.training import make_config

CPU = torch.device("cpu")
MIB = 2**20


def configured(model: Path, *overrides: str) -> RunConfig:
    options = ("data.max_prompt_tokens=56", "data.batch_size=64", "actor.micro_batch_tokens=auto", *overrides)
    return make_config(model, *options)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Passes that were tried, where one takes 10 MiB and 0.5 MiB a token."""
    passes: list[tuple[int, int]] = []

    def measure(model: Any, block: Block, device: torch.device) -> tuple[float, float]:
        totals = row_totals(block).values()
        passes.append((len(totals), max(totals)))
        return (10 + 0.5 * sum(totals)) * MIB, 0.01

    monkeypatch.setattr(budget, "_try", measure)
    return passes


def free(monkeypatch: pytest.MonkeyPatch, mib: float) -> None:
    """Leaves so much, after the share that is taken and the optimizer's moments."""
    monkeypatch.setattr(budget, "later", lambda *_: 0.0)
    monkeypatch.setattr(budget, "free_bytes", lambda _device: mib * MIB / budget.SHARE["cpu"])


@pytest.mark.parametrize(("mib", "tokens"), [(42, 64), (60, 96), (90, 160), (300, 512), (1e6, 8192)])
def test_as_many_tokens_as_fit_and_no_pass_that_does_not(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tried: list[tuple[int, int]], mib: float, tokens: int
) -> None:
    """The longest row has 64 tokens, a step 128 rows; 580 tokens fit in 300 MiB and are rounded down to 512."""
    config, policy = configured(tiny_llama), load_policy(ModelConfig(path=str(tiny_llama)))
    free(monkeypatch, mib)
    assert sized(config.actor, config, policy, ONE).micro_batch_tokens == tokens
    assert tried[:3] == [(1, 16), (1, 32), (1, 64)]
    assert all(10 + 0.5 * rows * length <= mib for rows, length in tried)
    assert describe(policy, ONE)["micro_batch_tokens"].startswith(f"auto: {tokens} tokens; ")


def test_a_row_that_does_not_fit_is_refused_with_the_figures(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tried: list[tuple[int, int]]
) -> None:
    config, policy = configured(tiny_llama), load_policy(ModelConfig(path=str(tiny_llama)))
    free(monkeypatch, 30)
    with pytest.raises(MemoryError, match=r"a row of 64 tokens takes 0.04 GiB of the 0.03 there are: set gradient_ch"):
        sized(config.actor, config, policy, ONE)
    assert tried == [(1, 16), (1, 32)]


def test_a_slow_pass_is_the_last(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []

    def measure(_model: Any, block: Block, _device: torch.device) -> tuple[float, float]:
        passes.append(len(block))
        return float(sum(row_totals(block).values())), 60.0

    monkeypatch.setattr(budget, "_try", measure)
    config = configured(tiny_llama)
    sized(config.actor, config, load_policy(ModelConfig(path=str(tiny_llama))), ONE)
    assert passes == [1, 1, 1]


def test_any_other_setting_is_left_alone_but_packing_is_what_the_model_does(tiny_llama: Path) -> None:
    config = configured(tiny_llama, "actor.micro_batch_tokens=77")
    packed = load_policy(ModelConfig(path=str(tiny_llama)), config.actor)
    assert sized(config.actor, config, packed, ONE) == config.actor
    padded = sized(config.actor, config, load_policy(ModelConfig(path=str(tiny_llama))), ONE)
    assert padded == config.actor.model_copy(update={"packing": False})


@pytest.mark.parametrize("load", [load_policy, load_value_model])
@pytest.mark.parametrize("trained", [True, False])
def test_a_real_model_is_as_it_was(tiny_llama: Path, load: Any, trained: bool) -> None:
    config = configured(tiny_llama, "data.batch_size=4")
    model = load(ModelConfig(path=str(tiny_llama)), config.actor).requires_grad_(trained)
    before = [p.detach().clone() for p in model.parameters()]
    tokens = sized(config.actor, config, model, ONE).micro_batch_tokens
    assert isinstance(tokens, int)
    assert 64 <= tokens <= 8 * 64
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_what_a_pass_takes_is_measured() -> None:
    with Peak(CPU) as peak:
        held = torch.ones(16 * MIB)
    assert held.numel() == 16 * MIB
    assert 48 * MIB < peak.bytes < 160 * MIB


def test_free_memory_is_the_containers_where_it_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "CGROUP", tmp_path)
    whole = free_bytes(CPU)
    assert whole > MIB
    (tmp_path / "memory.current").write_text("3000\n")
    for limit, wanted in (("10000\n", 7000.0), ("max\n", None)):
        (tmp_path / "memory.max").write_text(limit)
        assert free_bytes(CPU) == wanted if wanted else free_bytes(CPU) > MIB


@pytest.mark.gpu
def test_a_gpu_holds_what_was_promised(tiny_llama: Path) -> None:
    """A pass with the budget takes what was foreseen, to a tenth."""
    config = configured(tiny_llama, "data.batch_size=4096", "model.device=cuda")
    model = load_policy(config.model, config.actor)
    assert isinstance(model, Policy)
    tokens = sized(config.actor, config, model, ONE).micro_batch_tokens
    assert isinstance(tokens, int)
    device = torch.device("cuda")
    peaks = [budget._try(model, budget._rows(rows // 64, 64, 8), device)[0] for rows in (tokens // 2, tokens)]
    assert peaks[1] <= budget.SHARE["cuda"] * free_bytes(device)
    assert peaks[0] < peaks[1]
