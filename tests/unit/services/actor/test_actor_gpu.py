"""The torch actor on a CUDA device: close to the CPU, repeatable, resumable."""

from pathlib import Path

import pytest
import torch

from tests.fakes.training import make_config, roll_out
from tests.unit.services.actor.test_actor_torch import RUN, actor_for, batch_for, bits, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OVERRIDES = ("model.device=cuda:0", "algorithm.advantage=grpo", "rollout.n=4", "actor.mini_batch_size=6")


async def test_gradients_are_those_of_the_cpu(tiny_llama: Path) -> None:
    results = []
    for device in ("cpu", "cuda:0"):
        config = make_config(tiny_llama, *OVERRIDES, f"model.device={device}", "actor.mini_batch_size=null")
        actor = await actor_for(config)
        await actor.update(RUN, 1, await batch_for(actor, roll_out(tiny_llama, n=4)))
        results.append(torch.cat([t.cpu().flatten() for name, t in bits(actor).items() if name.startswith("exp_avg/")]))
    assert torch.linalg.norm(results[1] - results[0]) <= 1e-4 * torch.linalg.norm(results[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_it_is_repeatable_and_resumes_bit_for_bit(tiny_llama: Path, tmp_path: Path, dtype: str) -> None:
    config = make_config(tiny_llama, *OVERRIDES, f"model.dtype={dtype}")
    samples = [roll_out(tiny_llama, n=4, step=number) for number in range(1, 5)]

    async def train(actor: object, numbers: range) -> None:
        for number in numbers:
            await actor.update(RUN, number, await batch_for(actor, samples[number - 1]))  # type: ignore[attr-defined]

    straight, first = await actor_for(config), await actor_for(config)
    await train(straight, range(1, 5))
    await train(first, range(1, 3))
    await (await first.stage()).save(str(tmp_path / "a"))
    second = await actor_for(config, tmp_path / "a")
    await train(second, range(3, 5))
    assert same(bits(second), bits(straight))


async def test_it_publishes_from_the_device(tiny_llama: Path) -> None:
    actor = await actor_for(make_config(tiny_llama, *OVERRIDES))
    published = await actor.publish(RUN)
    on_cpu = await actor_for(make_config(tiny_llama))
    assert published.digest == (await on_cpu.publish(RUN)).digest


async def test_parked_it_leaves_the_gpu_and_trains_on_as_if_it_had_not(tiny_llama: Path) -> None:
    samples = [roll_out(tiny_llama, n=4, step=number) for number in range(1, 3)]
    results = []
    for park in (False, True):
        actor = await actor_for(make_config(tiny_llama, *OVERRIDES, f"actor.park={park}"))
        model = actor._training.of(RUN).engine.model
        for number, rows in enumerate(samples, 1):
            assert next(model.parameters()).is_cuda != park
            await actor.update(RUN, number, await batch_for(actor, rows))
            assert next(model.parameters()).is_cuda
            await actor.publish(RUN)
            assert park != any(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
        results.append({name: tensor.cpu() for name, tensor in bits(actor).items()})
    assert same(*results)
