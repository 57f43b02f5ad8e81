"""The torch critic: values before tokens, learning, refusal, checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.critic.backends.torch import TorchCritic, explained_variance
from shared.batch.block import Block
from shared.config import RunConfig
from shared.rpc.errors import FailedPrecondition, InvalidArgument
from shared.training.sequences import collate
from tests.fakes.training import join, make_config, replaced, roll_out

RUN = "r"


async def critic_for(config: RunConfig, checkpoint: Path | None = None) -> TorchCritic:
    critic = TorchCritic(lambda: None)
    await critic.configure(config, RUN, str(checkpoint) if checkpoint else None)
    return critic


def bits(critic: TorchCritic) -> dict[str, torch.Tensor]:
    engine = critic._training.of(RUN).engine
    return {
        name: t.detach().clone() for name, t in [*engine.model.named_parameters(), *engine.optimizer.state().items()]
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


async def batch_for(critic: TorchCritic, samples: Block) -> Block:
    """The return of a token is whether the token before it is even: something to learn from the context."""
    values, _ = await critic.values(RUN, samples)
    pairs = zip(samples["prompt_ids"].rows(), samples["response_ids"].rows(), strict=True)
    returns = [(np.concatenate([prompt, response])[len(prompt) - 1 : -1] % 2 == 0) for prompt, response in pairs]
    return replaced(join(samples, values), "returns", [row.astype(float) for row in returns])


async def test_it_learns_and_says_how_well(tiny_llama: Path) -> None:
    critic = await critic_for(
        make_config(tiny_llama, "critic.optimizer.lr=3e-3", "critic.mini_batch_size=8", "critic.epochs=2")
    )
    history = []
    for step in range(1, 21):
        batch = await batch_for(critic, roll_out(tiny_llama, prompts=8, step=step))
        version, metrics = await critic.update(RUN, step, batch)
        history.append(metrics)
    assert version == 20 * 4 == critic.version()
    assert history[0]["explained_variance"] == pytest.approx(0, abs=1e-6), "untrained values are all 0"
    assert history[-1]["explained_variance"] > 0.6
    assert history[-1]["loss"] < 0.4 * history[0]["loss"]
    assert history[0]["grad_norm"] > 0


async def test_values_are_those_of_the_model_row_by_row(tiny_llama: Path) -> None:
    critic = await critic_for(make_config(tiny_llama))
    await critic.update(RUN, 1, await batch_for(critic, roll_out(tiny_llama)))
    samples = roll_out(tiny_llama, prompts=4)
    values, metrics = await critic.values(RUN, samples)
    model = critic._training.of(RUN).engine.model
    for key, row in zip(values.rows, values["values"].rows(), strict=True):
        with torch.no_grad():
            alone = model(collate(samples.select([key]), torch.device("cpu")))[0]
        np.testing.assert_allclose(row, alone, atol=1e-5)
    assert metrics["value"] == pytest.approx(values["values"].data.mean(), abs=1e-6)


async def test_masked_tokens_take_no_part(tiny_llama: Path) -> None:
    results = []
    for poison in (0.0, np.nan):
        critic = await critic_for(make_config(tiny_llama))
        batch = await batch_for(critic, roll_out(tiny_llama))
        masks = [np.array([1, *[0] * (len(row) - 1)]) for row in batch["response_mask"].rows()]
        batch = replaced(batch, "response_mask", masks)
        for name in ("returns", "values"):
            rows = [np.where(mask == 1, row, poison) for row, mask in zip(batch[name].rows(), masks, strict=True)]
            batch = replaced(batch, name, rows)
        await critic.update(RUN, 1, batch)
        results.append(bits(critic))
    assert same(*results)


async def test_what_is_not_finite_is_refused_and_nothing_changes(tiny_llama: Path) -> None:
    critic = await critic_for(make_config(tiny_llama, "critic.mini_batch_size=4"))
    good = await batch_for(critic, roll_out(tiny_llama, prompts=5))
    await critic.update(RUN, 1, good)
    before = bits(critic)
    returns = [row.copy() for row in good["returns"].rows()]
    returns[-1][0] = np.inf
    with pytest.raises(FailedPrecondition, match="at optimizer step"):
        await critic.update(RUN, 2, replaced(good, "returns", returns))
    assert same(bits(critic), before)


async def test_two_and_two_steps_are_four_bit_for_bit(tiny_llama: Path, tmp_path: Path) -> None:
    config = make_config(tiny_llama, "critic.mini_batch_size=4", "critic.epochs=2", "critic.optimizer.warmup_steps=9")

    async def train(critic: TorchCritic, steps: range) -> None:
        for step in steps:
            await critic.update(RUN, step, await batch_for(critic, roll_out(tiny_llama, step=step)))

    straight, first = await critic_for(config), await critic_for(config)
    await train(straight, range(1, 5))
    await train(first, range(1, 3))
    assert (await (await first.stage()).save(str(tmp_path / "a"))).version == first.version()
    second = await critic_for(config, tmp_path / "a")
    await train(second, range(3, 5))
    assert same(bits(second), bits(straight))


async def test_its_own_model_is_named_in_errors(tiny_llama: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"^critic\.model\.path: there is no directory '/no/such'"):
        await critic_for(make_config(tiny_llama, "critic.model={path: /no/such}"))
    await critic_for(make_config(Path("/no/such"), f"critic.model={{path: {tiny_llama}}}"))


async def test_missing_returns_are_named(tiny_llama: Path) -> None:
    critic = await critic_for(make_config(tiny_llama))
    batch = await batch_for(critic, roll_out(tiny_llama))
    with pytest.raises(InvalidArgument, match="'returns' is missing"):
        await critic.update(RUN, 1, replaced(batch, "returns", None))


def test_explained_variance_by_hand(tiny_llama: Path) -> None:
    block = roll_out(tiny_llama, prompts=1, n=1, max_tokens=4)
    length = len(block["response_ids"].data)
    returns = np.arange(length, dtype=float)
    for values, want in ((returns, 1.0), (np.zeros(length), 0.0), (returns / 2, 0.75), (-returns, -3.0)):
        made = replaced(replaced(block, "returns", [returns]), "values", [values])
        assert explained_variance(made) == pytest.approx(want)
    flat = replaced(replaced(block, "returns", [np.ones(length)]), "values", [returns])
    assert explained_variance(flat) == 0
