"""The torch reference: frozen, and equal to an untrained actor."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.reference.backends.torch import TorchReference
from shared.rpc.errors import FailedPrecondition, Unimplemented
from tests.fakes.tiny import write_tiny_llama
from tests.fakes.training import make_config, roll_out

RUN = "r"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_the_models_at_the_sampling_temperature(tiny_llama: Path, temperature: float) -> None:
    reference = TorchReference()
    configured = await reference.configure(make_config(tiny_llama, f"rollout.temperature={temperature}"), RUN, None)
    assert configured.version == 0 == reference.version()
    assert configured.facts["parameters"] == str(sum(p.numel() for p in reference._frozen.of(RUN).policy.parameters()))
    samples = roll_out(tiny_llama, prompts=4, temperature=temperature)
    block, metrics = await reference.logprobs(RUN, samples)
    assert list(block.columns) == ["ref_logprobs"]
    np.testing.assert_allclose(block["ref_logprobs"].data, samples["rollout_logprobs"].data, atol=1e-5)
    assert metrics["ref_logprobs"] < 0


async def test_another_model_may_be_named(tiny_llama: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", seed=5)
    reference = TorchReference()
    await reference.configure(make_config(tiny_llama, f"reference_model={{path: {other}}}"), RUN, None)
    samples = roll_out(other, prompts=4)
    block, _ = await reference.logprobs(RUN, samples)
    np.testing.assert_allclose(block["ref_logprobs"].data, samples["rollout_logprobs"].data, atol=1e-5)
    with pytest.raises(FailedPrecondition, match=r"^reference_model\.path"):
        await reference.configure(make_config(tiny_llama, "reference_model={path: /no/such}"), RUN, None)
    assert reference.version() == -1


async def test_it_is_frozen_and_has_nothing_to_save(tiny_llama: Path, tmp_path: Path) -> None:
    reference = TorchReference()
    await reference.configure(make_config(tiny_llama), RUN, None)
    assert not any(p.requires_grad for p in reference._frozen.of(RUN).policy.parameters())
    with pytest.raises(Unimplemented):
        await reference.stage()
    await reference.release(RUN)
    assert reference.version() == -1


async def test_the_order_of_rows_changes_no_bit(tiny_llama: Path) -> None:
    reference = TorchReference()
    await reference.configure(make_config(tiny_llama), RUN, None)
    samples = roll_out(tiny_llama, prompts=7, n=3)
    one, _ = await reference.logprobs(RUN, samples)
    other, _ = await reference.logprobs(RUN, samples.select(samples.rows[::-1]))
    assert other.select(one.rows).digest() == one.digest()
    assert torch.is_grad_enabled()
