"""The torch actor: consistent with the rollout, invariant, repeatable, all or nothing, saved and exported."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.actor.backends.torch import TorchActor
from services.actor.objective import Objective
from shared.batch.block import Block
from shared.config import RunConfig
from shared.gen.sextet.v1 import actor_pb2, common_pb2
from shared.rpc.errors import DamagedCheckpoint, FailedPrecondition, InvalidArgument, PartlyApplied
from shared.rpc.history import Applied
from shared.training.engine import Engine
from shared.training.models import load_policy
from shared.training.sequences import trainable
from shared.weights.digest import state_digest
from shared.weights.grpc import GrpcPublisher
from tests.fakes.training import join, make_config, replaced, roll_out, score

RUN = "r"
GRPO = ("algorithm.advantage=grpo", "rollout.n=4")


def new_actor() -> TorchActor:
    id = common_pb2.OperationId(run=RUN, step=7, name="actor.update")
    applied = Applied(id, 3, b"digest", actor_pb2.ActorServiceUpdateResponse(version=7))
    return TorchActor(GrpcPublisher("here:1"), lambda: applied)


async def actor_for(config: RunConfig, checkpoint: Path | None = None) -> TorchActor:
    actor = new_actor()
    await actor.configure(config, RUN, str(checkpoint) if checkpoint else None)
    return actor


def lm_of(actor: TorchActor) -> torch.nn.Module:
    return actor._training.of(RUN).engine.model.lm


def bits(actor: TorchActor) -> dict[str, torch.Tensor]:
    engine = actor._training.of(RUN).engine
    return {
        name: t.detach().clone() for name, t in [*engine.model.named_parameters(), *engine.optimizer.state().items()]
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def count_nines(ids: np.ndarray) -> float:
    """Rewards token 9."""
    return float((ids == 9).mean())


async def batch_for(actor: TorchActor, samples: Block) -> Block:
    old, _ = await actor.logprobs(RUN, samples)
    columns = join(samples, score(samples, count_nines), old)
    # A reference that differs from the policy, and values that differ from zero.
    noisy = [row - 0.1 * np.cos(np.arange(len(row))) for row in old["old_logprobs"].rows()]
    columns = replaced(replaced(columns, "ref_logprobs", noisy), "values", [0.1 * row for row in noisy])
    batch, _ = await actor.advantages(RUN, columns)
    return batch


async def step(actor: TorchActor, number: int, n: int = 4) -> dict[str, float]:
    batch = await batch_for(actor, roll_out(lm_of(actor), prompts=4, n=n, step=number))
    return (await actor.update(RUN, number, batch))[1]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_the_rollouts_and_the_first_ratio_is_one(tiny_llama: Path, temperature: float) -> None:
    actor = await actor_for(make_config(tiny_llama, f"rollout.temperature={temperature}"))
    samples = roll_out(tiny_llama, prompts=5, temperature=temperature)
    old, metrics = await actor.logprobs(RUN, samples)
    np.testing.assert_allclose(old["old_logprobs"].data, samples["rollout_logprobs"].data, atol=1e-5)
    assert metrics["old_logprobs"] == pytest.approx(samples["rollout_logprobs"].data.mean(), abs=1e-5)
    assert metrics["entropy"] > 0
    batch = await batch_for(actor, samples)
    version, metrics = await actor.update(RUN, 1, batch)
    assert version == 1 == actor.version()
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_min"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"] == 0
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-5)
    assert metrics["grad_norm"] > 0
    assert metrics["lr"] == 1e-3


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor.loss.entropy_coef=0.1", "algorithm.kl.placement=loss", "algorithm.kl.estimator=k3"),
        ("actor.loss.aggregation=seq-mean-token-mean", "algorithm.policy_loss=gspo"),
        ("actor.loss.aggregation=seq-mean-token-sum-norm",),
        ("algorithm.policy_loss=clip_cov", "actor.loss.options={clip_cov_ratio: 0.3, clip_cov_lb: -5, clip_cov_ub: 5}"),
        ("algorithm.policy_loss=kl_cov", "actor.loss.options={kl_cov_ratio: 0.3}"),
    ],
)
async def test_gradients_do_not_depend_on_micro_batches_or_row_order(
    tiny_llama: Path, overrides: tuple[str, ...]
) -> None:
    """float64; after a first update, so that ratios are not 1."""
    actor = await actor_for(make_config(tiny_llama, *overrides))
    batch = await batch_for(actor, roll_out(tiny_llama, prompts=4, n=2))
    batch = batch.select(trainable(batch))
    gradients = []
    for size in (1, 2, 4, 100):
        for rows in (batch.rows, batch.rows[::-1]):
            config = make_config(
                tiny_llama, *overrides, f"actor.micro_batch_size={size}", "actor.optimizer.clip_grad=0"
            )
            engine = Engine(load_policy(config.model).double(), config.actor, seed=0, norm_length=8)
            with torch.no_grad():
                for p in engine.model.parameters():
                    p.mul_(1.02)
            objective = Objective(engine.model, config, engine.device, step=1)
            engine.update(batch.select(rows), objective, step=1, prepare=objective.prepare)
            moments = [t.flatten() for name, t in engine.optimizer.state().items() if name.startswith("exp_avg/")]
            gradients.append(torch.cat(moments))
    assert torch.linalg.norm(gradients[0]) > 1e-6
    for other in gradients[1:]:
        assert torch.linalg.norm(other - gradients[0]) <= 1e-6 * torch.linalg.norm(gradients[0])


async def test_training_makes_rewarded_tokens_likelier(tiny_llama: Path) -> None:
    config = make_config(
        tiny_llama,
        *GRPO,
        "actor.optimizer.lr=3e-3",
        "actor.mini_batch_size=8",
        "actor.epochs=2",
        "actor.loss.entropy_coef=0.001",
    )
    actor = await actor_for(config)

    def probability() -> float:
        lm, prompt = lm_of(actor), torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            return float(torch.softmax(lm(prompt).logits[0, -1], -1)[9])

    before = probability()
    for number in range(1, 16):
        metrics = await step(actor, number)
    assert probability() > 5 * before
    assert metrics["optimizer_steps"] == 4
    assert actor.version() == 60


async def test_with_a_rate_of_zero_nothing_drifts(tiny_llama: Path) -> None:
    actor = await actor_for(
        make_config(tiny_llama, *GRPO, "actor.optimizer.lr=0.0", "actor.epochs=2", "actor.mini_batch_size=5")
    )
    before = {name: p.detach().clone() for name, p in lm_of(actor).named_parameters()}
    for number in range(1, 4):
        metrics = await step(actor, number)
        assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert same(before, dict(lm_of(actor).named_parameters()))


async def test_the_same_inputs_give_the_same_bits(tiny_llama: Path) -> None:
    results = []
    for _ in range(2):
        actor = await actor_for(make_config(tiny_llama, *GRPO, "actor.mini_batch_size=6", "actor.epochs=2"))
        for number in range(1, 3):
            await step(actor, number)
        results.append(bits(actor))
    assert same(*results)


async def test_two_and_two_steps_are_four_bit_for_bit(tiny_llama: Path, tmp_path: Path) -> None:
    """With an adaptive KL coefficient, warm-up and several epochs."""
    config = make_config(
        tiny_llama, *GRPO, "actor.optimizer.warmup_steps=20", "actor.epochs=2", "actor.mini_batch_size=6",
        "algorithm.kl.placement=reward", "algorithm.kl.target=0.01", "algorithm.kl.horizon=100",
    )  # fmt: skip
    straight = await actor_for(config)
    for number in range(1, 5):
        await step(straight, number)
    first = await actor_for(config)
    for number in range(1, 3):
        await step(first, number)
    saved = await (await first.stage()).save(str(tmp_path / "a"))
    assert saved.version == 12
    second = await actor_for(config, tmp_path / "a")
    assert second.version() == 12
    for number in range(3, 5):
        await step(second, number)
    assert same(bits(second), bits(straight))
    coefficients = [each._training.of(RUN).kl.coef for each in (straight, second)]
    assert coefficients[0] == coefficients[1] != 0.001
    state = json.loads((tmp_path / "a" / "state.json").read_text())
    applied = Applied.from_fields(state["last_applied"])
    assert applied
    assert (applied.id.step, applied.epoch, applied.response.version) == (7, 3, 7)


async def test_a_damaged_checkpoint_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    config = make_config(tiny_llama)
    await (await (await actor_for(config)).stage()).save(str(tmp_path / "a"))
    (tmp_path / "a" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors' is damaged"):
        await actor_for(config, tmp_path / "a")


@pytest.mark.parametrize("mini_batch_size", ["4", "null"])
async def test_a_gradient_that_is_not_finite_is_refused_and_nothing_changes(
    tiny_llama: Path, mini_batch_size: str
) -> None:
    actor = await actor_for(make_config(tiny_llama, f"actor.mini_batch_size={mini_batch_size}"))
    good = await batch_for(actor, roll_out(tiny_llama, prompts=5))
    await actor.update(RUN, 1, good)
    before = bits(actor)
    advantages = [row.copy() for row in good["advantages"].rows()]
    advantages[-1][0] = np.nan
    with pytest.raises(FailedPrecondition, match="nan at optimizer step"):
        await actor.update(RUN, 2, replaced(good, "advantages", advantages))
    assert same(bits(actor), before)
    assert actor.version() == (1 if mini_batch_size == "null" else 3)
    await actor.update(RUN, 2, good)


async def test_nan_where_no_loss_is_carried_changes_nothing(tiny_llama: Path) -> None:
    results = []
    for poison in (0.0, np.nan):
        actor = await actor_for(make_config(tiny_llama, "actor.loss.entropy_coef=0.1", "algorithm.kl.placement=loss"))
        batch = await batch_for(actor, roll_out(tiny_llama, prompts=4))
        masks = [np.array([1, *[0] * (len(row) - 1)]) for row in batch["response_mask"].rows()]
        batch = replaced(batch, "response_mask", masks)
        for name in ("advantages", "old_logprobs", "ref_logprobs"):
            rows = [np.where(mask == 1, row, poison) for row, mask in zip(batch[name].rows(), masks, strict=True)]
            batch = replaced(batch, name, rows)
        await actor.update(RUN, 1, batch)
        results.append(bits(actor))
    assert same(*results)


async def test_a_batch_without_a_trainable_row_takes_no_step(tiny_llama: Path) -> None:
    actor = await actor_for(make_config(tiny_llama))
    batch = await batch_for(actor, roll_out(tiny_llama))
    nothing = replaced(batch, "response_mask", [np.zeros(n) for n in batch["response_mask"].lengths])
    before = bits(actor)
    version, metrics = await actor.update(RUN, 1, nothing)
    assert (version, metrics["optimizer_steps"]) == (0, 0)
    assert same(bits(actor), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_export_loads_and_published_weights_are_the_same(tiny_llama: Path, tmp_path: Path, dtype: str) -> None:
    actor = await actor_for(make_config(tiny_llama, *GRPO, f"model.dtype={dtype}"))
    await step(actor, 1)
    await actor.export(RUN, tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert str(exported.dtype) == f"torch.{dtype}"
    ids, lm = torch.tensor([[5, 6, 7]]), lm_of(actor)
    torch.testing.assert_close(
        exported(ids).logits.float(), lm(ids).logits, atol=1e-6 if dtype == "float32" else 0.1, rtol=0
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("1+1")["input_ids"] == [31, 41, 31]
    assert "lm_head.weight" not in load_file(tmp_path / "model" / "model.safetensors"), "tied weights are stored once"
    published = await actor.publish(RUN)
    assert published.version == 1
    assert published.digest == state_digest(exported.state_dict())
    assert published.endpoints == ["here:1"]
    await actor.export(RUN, tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]


async def test_published_weights_do_not_move_with_training(tiny_llama: Path) -> None:
    publisher = GrpcPublisher("here:1")
    actor = TorchActor(publisher, lambda: None)
    await actor.configure(make_config(tiny_llama, *GRPO), RUN, None)
    before = state_digest(lm_of(actor).state_dict())
    first = await actor.publish(RUN)
    await step(actor, 1)
    assert first.digest == before != (await actor.publish(RUN)).digest
    assert publisher.held(RUN, 0).manifest.digest == before
    await actor.release(RUN)
    assert publisher.held_bytes == 0
    assert actor.version() == -1


async def test_another_run_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(FailedPrecondition, match="is not configured, not for run 'r'"):
        await new_actor().publish(RUN)
    actor = await actor_for(make_config(tiny_llama))
    with pytest.raises(FailedPrecondition, match="is configured for run 'r', not for run 'other'"):
        await actor.publish("other")
    await actor.release("other")
    assert actor.version() == 0


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (("model.path=/no/such",), FailedPrecondition, r"model\.path: there is no directory '/no/such'"),
        (("algorithm.advantage=gea",), InvalidArgument, "'gea'; did you mean 'gae'"),
        (("algorithm.policy_loss=pppo",), InvalidArgument, "'pppo'; did you mean 'ppo'"),
        (("algorithm.kl.estimator=k9",), InvalidArgument, "unknown KL estimator 'k9'"),
        (("algorithm.advantage=grpo", "rollout.n=1"), InvalidArgument, r"set rollout\.n >= 2"),
        (("actor.loss.options={colour: 1}",), InvalidArgument, "'colour'"),
        (("algorithm.correction.mode=bypass", "algorithm.correction.token_cap=2"), InvalidArgument, "token_cap"),
        (("algorithm.overlong_buffer=9",), InvalidArgument, "overlong_buffer is 9"),
        (("algorithm.kl.placement=loss", "algorithm.kl.target=0.1"), InvalidArgument, r"kl\.target=0.1 needs"),
        (("algorithm.kl.placement=reward", "algorithm.kl.target=0.0"), InvalidArgument, r"kl\.target=0.0 needs"),
    ],
)
async def test_what_cannot_work_is_refused_when_configured(
    tiny_llama: Path, overrides: tuple[str, ...], error: type[Exception], message: str
) -> None:
    actor = new_actor()
    with pytest.raises(error, match=message):
        await actor.configure(make_config(tiny_llama, *overrides), RUN, None)
    assert actor.version() == -1


async def test_gradient_checkpointing_changes_no_result(tiny_llama: Path) -> None:
    results = []
    for on in ("false", "true"):
        actor = await actor_for(make_config(tiny_llama, *GRPO, f"actor.gradient_checkpointing={on}"))
        await step(actor, 1)
        results.append(torch.cat([p.detach().flatten() for p in lm_of(actor).parameters()]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mini_batch_size", ["4", "null"])
async def test_a_step_that_fails_half_way_is_undone_or_named(
    tiny_llama: Path, tmp_path: Path, mini_batch_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one optimizer step per update there is no copy to go back to: a fault stays until it is configured."""
    config = make_config(tiny_llama, f"actor.mini_batch_size={mini_batch_size}")
    actor = await actor_for(config)
    batch = await batch_for(actor, roll_out(tiny_llama, prompts=5))
    await actor.update(RUN, 1, batch)
    await (await actor.stage()).save(str(tmp_path / "a"))
    before, original = bits(actor), torch.optim.AdamW.step

    def half(adamw: torch.optim.AdamW) -> None:
        original(adamw)
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(torch.optim.AdamW, "step", half)
    if mini_batch_size == "4":
        with pytest.raises(FailedPrecondition, match="out of memory: lower micro_batch_size"):
            await actor.update(RUN, 2, batch)
        assert same(bits(actor), before)
        assert actor.fault() == ""
        return
    with pytest.raises(PartlyApplied, match="optimizer step 2 failed half-way: no memory left"):
        await actor.update(RUN, 2, batch)
    assert "half-way" in actor.fault()
    with pytest.raises(FailedPrecondition, match="must be configured again"):
        await actor.publish(RUN)
    await actor.configure(config, RUN, str(tmp_path / "a"))
    assert actor.fault() == ""
    assert same(bits(actor), before)
