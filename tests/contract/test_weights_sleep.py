"""A vLLM engine that shares its GPU (rollout.sleep): what it frees, and that it comes back as it was, or with a sync.

On a machine with a GPU: pytest -m gpu tests/contract/test_weights_sleep.py
"""

import asyncio

import pytest
import torch
from transformers import AutoTokenizer

from services.rollout.backend import EngineError, SamplingParams
from tests.contract.test_weights_sync import Actor
from tests.fakes.rollout import collect, requests, rollout_config
from tests.fakes.tiny import write_tiny_llama

pytest.importorskip("vllm", reason="vLLM is not installed")
from services.rollout.backends.vllm import VllmBackend
from services.rollout.backends.vllm_start import engine_args

GREEDY = requests(6, SamplingParams(max_tokens=10, greedy=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be shared")
def test_on_a_cpu_there_is_nothing_to_share(tmp_path):
    config = rollout_config(tmp_path, "rollout.engine=vllm", "rollout.sleep=true")
    with pytest.raises(EngineError, match="can't sleep on a CPU"):
        engine_args(config, 64)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_asleep_it_frees_the_gpu_and_comes_back_in_stages(tmp_path):
    model = write_tiny_llama(tmp_path / "model", head_dim=64)
    arguments = "rollout.engine_args={gpu_memory_utilization: 0.3, max_num_seqs: 8}"
    overrides = ("model.device=cuda", "rollout.engine=vllm", "rollout.sleep=true", arguments)
    engine, actor = VllmBackend(), Actor(model, "grpc")
    await engine.configure(rollout_config(model, *overrides), AutoTokenizer.from_pretrained(model), prompt_tokens=40)
    try:
        total, free = torch.cuda.mem_get_info()[1], []

        async def turn() -> dict:
            async with engine.turn():
                return await collect(engine.generate(GREEDY))

        async def greedy() -> dict:
            answers = await turn()
            free.append(torch.cuda.mem_get_info()[0])
            return {key: (sample.response_ids, sample.logprobs) for key, sample in answers.items()}

        def same(some: dict, others: dict) -> bool:
            """The same tokens; a GPU's kernels may round the last bits of log-probs in other ways each time."""
            return all(
                ids == others[key][0] and logprobs == pytest.approx(others[key][1], abs=1e-4)
                for key, (ids, logprobs) in some.items()
            )

        first = await greedy()
        assert free[-1] > 0.9 * total, "asleep before the last row's call has ended"
        assert await engine.health() == ""
        assert same(await greedy(), first), "the weights came back as they were"
        actor.train(0.05)
        await engine.prepare_weights(1, dict(actor.lm.state_dict()))
        await engine.commit_weights(1)
        assert torch.cuda.mem_get_info()[0] > 0.9 * total, "weights alone are awake"
        changed = await greedy()
        assert not same(changed, first)
        assert same(await greedy(), changed)
        overlapping = await asyncio.gather(*(turn() for _ in range(3)))
        assert all(len(found) == len(GREEDY) for found in overlapping)
        # Somebody asks over the endpoint while the actor has the memory, and an agent thinks between two of its turns.
        asked = asyncio.create_task(collect(engine.generate(GREEDY)))
        await asyncio.sleep(3)
        assert torch.cuda.mem_get_info()[0] > 0.9 * total
        async with engine.turn():
            await asked
            assert torch.cuda.mem_get_info()[0] < 0.8 * total
            await asyncio.sleep(1)
            assert await engine.health() == ""
            await collect(engine.generate(GREEDY))
            assert torch.cuda.mem_get_info()[0] < 0.8 * total
        assert torch.cuda.mem_get_info()[0] > 0.9 * total
    finally:
        await engine.release()
