"""Stages on ranks of their own give what one process gives: updates, log-probs, values, checkpoints, weights."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GraniteConfig, LlamaConfig

from shared.config import ModelConfig, OptimizerConfig, ParallelConfig
from shared.training.engine import Engine, map_rows, my_shares
from shared.training.errors import ModelError, NonFiniteError
from shared.training.export import export, shards_of, weights_of
from shared.training.flops import Work
from shared.training.group import ALONE, Group
from shared.training.models import Policy
from shared.training.optimizer import Optimizer
from shared.training.parallel import Parallel, plan_parallel
from shared.training.regions import local
from shared.training.sharding import build, load_policy, load_value_model
from shared.training.stages import LAYERS, Elsewhere, cut
from shared.weights.grpc import GrpcPublisher
from shared.weights.maker import MakerRanks
from tests.fakes.ranks import run_ranks
from tests.fakes.tiny import write_tiny_llama
from tests.unit.shared.training.test_training_engine import make_block
from tests.unit.shared.training.test_training_sharded import (
    loss_of,
    one_rank,
    outline_of,
    refused,
    score,
    training,
    whole_of,
)
from tests.unit.shared.training.test_training_shards import load, make_engine, parts, save, train, unchanged

pytestmark = pytest.mark.timeout(240)
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"parallel": {"pp": 2}, "micro_batch_size": 1},
        {"parallel": {"pp": 2}, "micro_batch_size": 2, "packing": False, "checkpointing": True},
        {"parallel": {"pp": 2}, "micro_batch_size": 8},
        {"parallel": {"pp": 2}, "micro_batch_tokens": 12, "model": "value"},
        {"parallel": {"pp": 2}, "micro_batch_size": 1, "model": "lora", "checkpointing": True},
    ],
    4: [
        {"parallel": {"pp": 2, "dp": 2}, "micro_batch_size": 1},
        {"parallel": {"pp": 2, "shard": 1}, "micro_batch_size": 1},
        {"parallel": {"pp": 2, "shard": 1, "accumulate": "whole"}, "micro_batch_tokens": 12, "packing": False},
        {"parallel": {"pp": 2, "accumulate": "whole"}, "micro_batch_size": 1, "checkpointing": True},
        {"parallel": {"pp": 2}, "micro_batch_size": 1, "model": "value"},
        {"parallel": {"pp": 2, "tp": 2}, "micro_batch_size": 1},
        {"parallel": {"pp": 2, "tp": 2}, "micro_batch_size": 2, "model": "value", "checkpointing": True},
        {"parallel": {"pp": 2, "cp": 2}, "micro_batch_size": 2},
        {"parallel": {"pp": 2, "offload": True}, "micro_batch_size": 1, "model": "lora"},
        {"parallel": {"pp": 4}, "micro_batch_size": 1, "checkpointing": True},
        {"parallel": {"pp": 4}, "micro_batch_size": 2, "model": "value"},
    ],
}


def on_rank(group: Group, job: dict[str, Any]) -> list[Any]:
    """Of each case: this stage's parameters, metrics, scores; and what a loss that is not finite leads to."""
    results: list[Any] = []
    for case in job["cases"]:
        config = training(case)
        parallel = plan_parallel(config.parallel, group, "actor.parallel")
        load = load_value_model if case.get("model") == "value" else load_policy
        path = job["models"][case.get("model", "tiny")]
        model = load(ModelConfig(path=path), config, parallel, seed=5)
        engine, whole = Engine(model, config, seed=3, norm_length=16, parallel=parallel), make_block()
        outline = outline_of(whole)
        mine = whole.select(engine.my_rows(outline, 1))
        metrics = engine.update(mine, loss_of(model), step=1, outline=outline)
        rows = [key for share in my_shares(outline, config, parallel) for key in share.rows.rows]
        (scores,) = map_rows(whole.select(rows), config, partial(score, model), parallel, outline, model)
        with torch.no_grad():
            full = [whole_of(p).flatten().tolist() for p in model.parameters()]
        held = sum(local(p).numel() for p in model.parameters())
        results.append((full, metrics, scores.data.tolist(), held, refused(engine, mine, outline)))
    return results


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_change_nothing(tmp_path: Path, size: int) -> None:
    models = {
        kind: str(write_tiny_llama(tmp_path / kind, layers=5, tied=kind == "value"))
        for kind in ("tiny", "value", "lora")
    }
    wanted = {kind: one_rank(model, kind) for kind, model in models.items()}
    job = {"models": models, "cases": CASES[size]}
    results = run_ranks("tests.unit.shared.training.test_training_pipeline:on_rank", size, job)
    for number, case in enumerate(CASES[size]):
        parameters, metrics, scores = wanted[case.get("model", "tiny")]
        # Stages have the parameters that one process has, in its order, each once.
        stages = [rank[number][0] for rank in results[:: size // case["parallel"]["pp"]]]
        for got, want in zip([p for stage in stages for p in stage], parameters, strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=0, atol=1e-5, msg=str(case))
        for rank in results:
            _, got, scored, held, said = rank[number]
            torch.testing.assert_close(torch.tensor(scored), torch.tensor(scores), rtol=0, atol=1e-5)
            for name in ("loss", "grad_norm", "nll", "logprob_min", "tokens", "optimizer_steps"):
                assert got[name] == pytest.approx(metrics[name], rel=1e-4), (case, name)
            assert held < sum(map(len, parameters)) * 0.8, "no full copy per rank"
            assert said.startswith("the loss is nan at optimizer step "), (case, said)


def kept_by_stages(group: Group, job: dict[str, Any]) -> dict[str, Any]:
    """From one process's checkpoint to two shards', to two stages', which publish and export; and one step further."""
    shards = make_engine(job["model"], group, {})
    load(shards, job["one"])
    save(shards, job["shards"])
    stages = make_engine(job["model"], group, {"pp": 2})
    state = load(stages, job["shards"])
    save(stages, job["stages"])
    again = make_engine(job["model"], group, {"pp": 2})
    load(again, job["stages"])
    publisher = GrpcPublisher(ranks=MakerRanks(group))
    ref = publisher.publish(1, shards_of(stages.model), run="r")
    whole = {}
    if group.rank == 0:
        held = publisher.held("r", 1)
        names = [info.name for info in held.manifest.tensors]
        whole = {n: t.tolist() for n, t in zip(names, publisher.ranks.whole("r", held), strict=True)}
    group.exchange(None)
    export(stages.model, AutoTokenizer.from_pretrained(job["model"]), Path(job["export"]), stages.parallel)
    refusal = ""
    try:
        make_engine(job["tied"], group, {"pp": 2})
    except ModelError as error:
        refusal = str(error)
    same = unchanged(again, parts(stages))
    train(stages, 1)
    with torch.no_grad():
        full = [whole_of(p).flatten().tolist() for p in stages.model.parameters()]
    return {"state": state, "same": same, "digest": ref.digest, "whole": whole, "refusal": refusal, "trained": full}


def test_stages_keep_publish_and_export_what_one_process_has(tiny_llama: Path, tmp_path: Path) -> None:
    model = str(write_tiny_llama(tmp_path / "model", layers=3, tied=False))
    one = make_engine(model, ALONE, {})
    train(one, 0)
    job = {name: str(tmp_path / name) for name in ("one", "shards", "stages", "export")}
    save(one, job["one"])
    job |= {"model": model, "tied": str(tiny_llama)}
    results = run_ranks("tests.unit.shared.training.test_training_pipeline:kept_by_stages", 2, job)
    wanted = weights_of(one.model)
    assert results[0]["whole"] == {name: tensor.tolist() for name, tensor in wanted.items()}
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in wanted.items())
    digest = GrpcPublisher().publish(1, shards_of(one.model), run="r").digest
    for rank in results:
        assert rank["state"]["optimizer_steps"] == 1
        assert rank["same"], "bit for bit"
        assert rank["digest"] == digest
        assert "embedding is its head (tie_word_embeddings), but with parallel.pp=2" in rank["refusal"]
    other = make_engine(model, ALONE, {})
    load(other, job["stages"])
    assert unchanged(other, parts(one)), "bit for bit"
    train(one, 1)
    trained = [p for rank in results for p in rank["trained"]]
    for got, parameter in zip(trained, one.model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(got), parameter.detach().flatten(), rtol=0, atol=1e-5)


FAILURES = [(rank, when, call) for rank in (0, 1) for when in ("forward", "backward") for call in (0, 2)]
"""The rank whose memory does not suffice, and for which of its passes (the second mini-batch begins with the third)."""


def short_of_memory(group: Group, job: dict[str, Any]) -> list[Any]:
    """Of each failure: what is said, and whether nothing changed. Then: whether training goes on as if all was well."""
    config = training({"parallel": {"pp": 2}, "micro_batch_size": 2, "checkpointing": job["checkpointing"]})
    parallel, whole, results = plan_parallel(config.parallel, group, "actor.parallel"), make_block(), []
    outline = outline_of(whole)
    engines = [
        Engine(load_policy(ModelConfig(path=job["model"]), config, parallel), config, seed=3, norm_length=16,
               parallel=parallel) for _ in range(2)
    ]  # fmt: skip
    mine = whole.select(engines[0].my_rows(outline, 1))

    def update(engine: Engine[Any]) -> dict[str, float]:
        return engine.update(mine, loss_of(engine.model), step=1, outline=outline)

    def scores(engine: Engine[Any]) -> list[float]:
        (column,) = map_rows(whole, config, partial(score, engine.model), parallel, outline, engine.model)
        return column.data.tolist()

    failing, other = engines
    works = [(failure, update) for failure in FAILURES] + [((rank, "forward", 1), scores) for rank in (0, 1)]
    for (rank, when, call), work in works:
        before, said = parts(failing), ""
        with pytest.MonkeyPatch.context() as patch:
            if group.rank == rank:
                layer = [layer for layer in failing.model.backbone().layers if not isinstance(layer, Elsewhere)][-1]
                patch.setattr(layer.mlp, "forward", Short(layer.mlp.forward, when, call))
            try:
                work(failing)
            except MemoryError as error:
                said = str(error)
        results.append([said, unchanged(failing, before), all(p.grad is None for p in failing.model.parameters())])
    for engine in engines:
        update(engine)
    return [*results, unchanged(failing, parts(other)) and scores(failing) == scores(other)]


class Short:
    """A module's forward, for one call of which memory does not suffice, or not for its backward pass."""

    def __init__(self, plain: Any, when: str, call: int) -> None:
        self.plain, self.when, self.left = plain, when, call

    def __call__(self, *args: Any) -> torch.Tensor:
        made, self.left = self.plain(*args), self.left - 1
        if self.left == -1 and self.when == "forward":
            self.run_out()
        if self.left == -1 and made.requires_grad:
            made.register_hook(self.run_out)
        return made

    def run_out(self, *_: object) -> None:
        raise torch.OutOfMemoryError("none left\nmore")


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_memory_missing_on_one_stage_is_an_error_on_all_and_changes_nothing(
    tmp_path: Path, checkpointing: bool
) -> None:
    model = str(write_tiny_llama(tmp_path / "model", layers=3, tied=False))
    job = {"model": model, "checkpointing": checkpointing}
    ranks = run_ranks("tests.unit.shared.training.test_training_pipeline:short_of_memory", 2, job)
    assert ranks[0] == ranks[1]
    *failures, same = ranks[0]
    short = [rank for rank, _, _ in FAILURES] + [0, 1]
    for rank, (said, unchanged_, clear) in zip(short, failures, strict=True):
        advice = (
            r"lower micro_batch_size to 1 \(or set micro_batch_tokens to \d+\): a micro-batch of 2 x \d+ tokens does"
        )
        assert re.fullmatch(rf"{advice} not fit: none left \(rank {rank}\)", said)
        assert unchanged_
        assert clear
    assert same, "bit for bit"


def first_bad(group: Group, job: dict[str, Any]) -> list[str]:
    """What is said of gradients that are not finite on the last rank only."""
    results = []
    for parallel in ({"pp": 2}, {"dp": 2}):
        engine = make_engine(job["model"], group, parallel)
        for name, p in engine.model.named_parameters():
            p.grad = torch.zeros_like(p)
            if group.rank and name in ("lm.model.layers.2.mlp.up_proj.weight", "lm.model.norm.weight"):
                local(p.grad).view(-1)[-1] = torch.inf
        try:
            engine.optimizer.step()
        except NonFiniteError as error:
            results.append(str(error))
    return results


def test_a_gradient_that_is_not_finite_on_one_rank_is_named(tmp_path: Path) -> None:
    model = str(write_tiny_llama(tmp_path / "model", layers=3, tied=False))
    ranks = run_ranks("tests.unit.shared.training.test_training_pipeline:first_bad", 2, {"model": model})
    said = "the gradient of 'lm.model.layers.2.mlp.up_proj.weight' is not finite at optimizer step 1"
    assert ranks == [[said] * 2] * 2


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def place(rank: int, pp: int) -> Parallel:
    return plan_parallel(ParallelConfig(pp=pp), Group(rank, pp), "actor.parallel")


@pytest.mark.parametrize(("layers", "pp", "held"), [(7, 3, [3, 2, 2]), (4, 4, [1, 1, 1, 1]), (5, 4, [2, 1, 1, 1])])
def test_layers_are_divided_in_order(layers: int, pp: int, held: list[int]) -> None:
    names, work = [], 0.0
    for rank in range(pp):
        lm = build(LlamaConfig(**SMALL, num_hidden_layers=layers))
        cut(lm, place(rank, pp), "model", tied=True)
        assert sum(not isinstance(layer, Elsewhere) for layer in getattr(lm.base_model, LAYERS)) == held[rank]
        names += [name for name, _ in lm.named_parameters()]
        work += Work(Policy(lm)).forward([12, 5], 7)
    whole = build(LlamaConfig(**SMALL, num_hidden_layers=layers))
    assert names == [name for name, _ in whole.named_parameters()]
    assert work == Work(Policy(whole)).forward([12, 5], 7)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (LlamaConfig(**SMALL, num_hidden_layers=2), r"parallel.pp=3 stages for 2 layers: set it to 2 at most"),
        (
            GPT2Config(n_embd=32, n_layer=4, n_head=4),
            r"gpt2 models have no plan for parallel.pp=3: set parallel.pp to 1",
        ),
        (
            LlamaConfig(**SMALL, num_hidden_layers=4, tie_word_embeddings=True),
            r"with parallel.pp=3 they are on different",
        ),
        (
            GraniteConfig(**SMALL, num_hidden_layers=4, embedding_multiplier=2.0),
            r"granite models do more between their",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_into_stages_is_refused(config: Any, why: str) -> None:
    with pytest.raises(ModelError, match="^model: .*" + why):
        cut(build(config), place(0, 3), "model", tied=True)


@pytest.mark.parametrize(
    ("config", "size", "want"),
    [
        ({"pp": 3}, 4, r"actor.parallel.pp=3 does not divide the 4 ranks of this service"),
        ({"pp": 2, "tp": 4}, 4, r"actor.parallel: tp 4 x pp 2 = 8 does not divide the 4 ranks"),
        ({"pp": 2, "dp": 4}, 4, r"actor.parallel: dp 4 x tp 1 x pp 2 = 8 ranks, .* set actor.parallel.dp to 2"),
    ],
)
def test_a_world_size_that_does_not_fit_is_refused_with_the_arithmetic(
    config: dict[str, int], size: int, want: str
) -> None:
    with pytest.raises(ValueError, match=want):
        plan_parallel(ParallelConfig(**config), Group(0, size), "actor.parallel")  # type: ignore[arg-type]


def test_ranks_of_a_stage_stand_one_after_the_other() -> None:
    ranks = [plan_parallel(ParallelConfig(pp=2, tp=2, shard=1), Group(rank, 8), "actor.parallel") for rank in range(8)]
    assert [(p.stage, p.place, p.dp_rank, p.tp_rank) for p in ranks] == [
        (rank // 4, rank % 4, rank % 4 // 2, rank % 2) for rank in range(8)
    ]
    assert list(range(8))[ranks[0].telling] == [4, 6], "one rank of the last stage for each share of the rows"


class Told(Group):
    """Rank 0 of two, where the other stage's norm is 4."""

    def exchange(self, value: Any) -> list[Any]:
        return [value, 4.0]


def test_gradients_are_clipped_by_the_norm_over_all_stages() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    parallel = plan_parallel(ParallelConfig(pp=2), Told(0, 2), "actor.parallel")
    optimizer = Optimizer(model, OptimizerConfig(lr=0.0, clip_grad=1.0), parallel)
    model.weight.grad = torch.tensor([[3.0, 0.0]])
    assert optimizer.step()[0] == math.hypot(3.0, 4.0)
    assert optimizer.state()["exp_avg/weight"].flatten().tolist() == pytest.approx([0.1 * 3 / 5, 0.0])
