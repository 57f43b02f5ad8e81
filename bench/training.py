"""A PPO update of actor and critic: samples/s, MFU and memory, in one table.

    python bench/training.py --shapes tiny --rows 16 --prompt 32 --response 32          # on a CPU
    python bench/training.py --shapes 1b,7b --rows 32 --json OUT.json                   # on a GPU
    python bench/training.py --shapes 1b,7b --rows 32 --ranks 2                         # on two
    python bench/training.py --shapes 1b,7b --rows 32 --trl                             # beside TRL: pip install trl

A shape is a Llama with random weights. An update is what the roles do in a step with a batch of --rows samples: the
actor's log-probs, the critic's values, and an optimizer step of each. Both are measured one after the other, each alone
on the device; of five tries the median of the last three counts. A line is printed when it is done, also if memory did
not suffice. With --trl the actor's optimizer step (actor_s, nothing else) is done by TRL's GRPOTrainer, too: see
bench/training_trl.py for what that includes.
"""

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.rollout_shapes import SHAPES as ALL_SHAPES
from bench.rollout_shapes import VOCABULARY

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {name: ALL_SHAPES[name] for name in ("tiny", "1b", "7b")}
MICRO = {("tiny", True): 8, ("tiny", False): 8, ("1b", True): 16, ("1b", False): 8, ("7b", True): 8, ("7b", False): 1}
"""Rows of a micro-batch, by shape and whether activations are recomputed."""
COLUMNS = ("shape", "ranks", "recompute", "micro", "samples_s", "logprobs_s", "actor_s", "values_s", "critic_s",
           "actor_mfu", "critic_mfu", "actor_gib", "critic_gib", "gradient_error")  # fmt: skip
BESIDE_TRL = ("actor_samples_s", "trl_samples_s", "over_trl", "trl_gib", "grad_norm", "trl_grad_norm")
"""Columns that --trl adds. Same rows, weights and loss: the gradients' norms have to be the same."""
WARM_UP, COUNTED = 2, 3
"""Tries that go before and tries that count."""


def make_batch(rows: int, prompt: int, response: int, uneven: bool) -> Any:
    """A training batch of random tokens, as ComputeAdvantages makes it.

    Args:
        uneven: responses of 1 to `response` tokens, where they are all of `response` otherwise.
    """
    import numpy as np

    from shared.batch.block import Block, Ragged, RowKey

    rng = np.random.default_rng(0)
    prompts = np.full(rows, prompt, np.uint32)
    responses = rng.integers(1, response + 1, rows).astype(np.uint32) if uneven else np.full(rows, response, np.uint32)
    total = int(responses.sum())

    def floats(spread: float) -> Any:
        return rng.normal(0, spread, total).astype(np.float32)

    columns = {
        "prompt_ids": Ragged(rng.integers(0, VOCABULARY, rows * prompt).astype(np.int32), prompts),
        "response_ids": Ragged(rng.integers(0, VOCABULARY, total).astype(np.int32), responses),
        "response_mask": Ragged(np.ones(total, np.uint8), responses),
        "old_logprobs": Ragged(floats(0.1) - 10.4, responses),
        "advantages": Ragged(floats(1), responses),
        "returns": Ragged(floats(1), responses),
        "values": Ragged(floats(0.1), responses),
    }
    return Block(tuple(RowKey(f"1:{row}:0", 0) for row in range(rows)), columns)


def make_config(shape: str, recompute: bool, job: dict[str, Any]) -> Any:
    from shared.config_loading import load_config

    training = {
        "micro_batch_size": job["micro"] or MICRO[shape, recompute], "gradient_checkpointing": recompute,
        "parallel": job["parallel"], "packing": not job["padded"],
        "eight_bit_activations": job["eight_bit"],
    }  # fmt: skip
    return load_config(
        {
            "model": {"path": shape, "dtype": job["dtype"]},
            "data": {"path": "none"},
            "reward": {"function": "none:none"},
            "total_steps": 1,
            "rollout": {"max_tokens": job["response"]},
            "actor": training,
            "critic": training,
        }
    )


def make_model(kind: Any, shape: str, config: Any, training: Any, parallel: Any) -> Any:
    """A policy or value model with random weights, cut over the ranks where there are several."""
    import torch

    from shared.training.models import ValueModel, adopt
    from shared.training.sharding import distribute, lay_out

    lm, dtype = adopt(empty(shape), training, shape, shape), getattr(torch, config.model.dtype)
    model = kind(lm.base_model, lm.config.hidden_size, dtype) if kind is ValueModel else kind(lm, dtype)
    if parallel.group.size > 1:
        # A value head is made here with memory; all others have none yet.
        distribute(model, lm, parallel, fill, "model")
    else:
        fill_all(model)
    lay_out(model, training, parallel, shape)
    return model


def empty(shape: str) -> Any:
    """A language model whose parameters have no memory yet."""
    from transformers import LlamaConfig

    from shared.training.sharding import build

    return build(LlamaConfig(**SHAPES[shape], vocab_size=VOCABULARY, max_position_embeddings=4096))


def fill(name: str, parameter: Any) -> None:
    from shared.training.regions import local

    values = local(parameter)
    values.fill_(1.0) if values.ndim < 2 else values.normal_(0, 0.02)


def fill_all(model: Any) -> Any:
    """The same weights whenever it is called for a shape."""
    import torch

    from shared.training.device import pick_device

    device = pick_device("auto")
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
    return model


def measure(role: Any, model: Any, config: Any, training: Any, parallel: Any, block: Any) -> Iterator[dict[str, float]]:
    """Seconds of scoring and of an update, try by try, with the metrics of the update."""
    import torch

    from shared.batch.block import Block, Ragged
    from shared.training.engine import Engine
    from shared.training.microbatch import TOKENS, row_totals
    from shared.training.parking import Parking

    engine = Engine(model, training, seed=0, norm_length=config.rollout.max_tokens, parallel=parallel)
    parts: dict[str, Any] = {"config": config, "engine": engine}
    if role.ROLE == "actor":
        kl = role._kl_controller(config.algorithm.kl)
        parts |= {"tokenizer": None, "kl": kl, "parking": Parking(model, engine.optimizer)}
    held, outline = role.Training(**parts), None
    scored = updated = block
    if parallel.group.size > 1:
        lengths = Ragged.from_scalars(list(row_totals(block).values()), "int32")
        overall = {name: block[name] for name in ("response_mask", "values", "returns")}
        outline = Block(block.rows, {**overall, TOKENS: lengths})
        scored, updated = (block.select(engine.my_rows(outline, step)) for step in (None, 1))
    score = role._logprobs if role.ROLE == "actor" else role._values

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        parallel.group.exchange(None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        result = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began, result

    for _ in range(WARM_UP + COUNTED):
        scoring, _ = timed(lambda: score(held, scored, outline))
        updating, metrics = timed(lambda: role._update(held, 1, updated, outline))
        yield {"scoring": scoring, "updating": updating, **metrics}


def run_row(shape: str, recompute: bool, parallel: Any, job: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    import torch

    from services.actor.backends import torch as actor
    from services.critic.backends import torch as critic
    from shared.training.models import Policy, ValueModel

    config = make_config(shape, recompute, job)
    block = make_batch(job["rows"], job["prompt"], job["response"], job["uneven"])
    row: dict[str, Any] = {"shape": shape, "ranks": parallel.group.size, "recompute": recompute,
                           "micro": config.actor.micro_batch_size, "rows": job["rows"]}  # fmt: skip
    names = {"actor": ("logprobs_s", "actor_s"), "critic": ("values_s", "critic_s")}
    try:
        for role, kind, training in ((actor, Policy, config.actor), (critic, ValueModel, config.critic)):
            last = run_role(role, kind, shape, config, training, parallel, block)
            row |= dict(zip(names[role.ROLE], (last["scoring"], last["updating"]), strict=True))
            row[f"{role.ROLE}_mfu"] = last.get("mfu")
            if role is actor:
                row |= {name: last[name] for name in ("grad_norm", "gradient_error") if name in last}
            row[f"{role.ROLE}_gib"] = last.get("memory_peak_gib", process_gib())
            free()
        row["samples_s"] = job["rows"] / sum(row[name] for pair in names.values() for name in pair)
    except (MemoryError, torch.OutOfMemoryError) as error:
        row["error"] = str(error).splitlines()[0]
    # Only now nothing refers to what was on the device: an exception's frames do.
    free()
    return row


def add_trl(row: dict[str, Any], job: dict[str, Any]) -> None:
    """TRL's update beside the actor's in a line of the table."""
    import torch

    from bench.training_trl import measure as measure_trl

    config = make_config(row["shape"], row["recompute"], job)
    block = make_batch(job["rows"], job["prompt"], job["response"], job["uneven"])
    if "actor_s" in row:
        row["actor_samples_s"] = job["rows"] / row["actor_s"]
    try:
        last = middle(measure_trl(fill_all(empty(row["shape"])), config, block, WARM_UP + COUNTED))
        row |= {"trl_s": last["updating"], "trl_gib": last.get("memory_peak_gib", process_gib())}
        row |= {"trl_grad_norm": last["grad_norm"], "trl_samples_s": job["rows"] / last["updating"]}
        if "actor_s" in row:
            row["over_trl"] = row["trl_s"] / row["actor_s"]
    except torch.OutOfMemoryError as error:
        row["trl_samples_s"] = f"out of memory: {str(error).splitlines()[0][:90]}"
    free()


def middle(tries: Iterable[dict[str, float]]) -> dict[str, float]:
    """Of every number the median over the tries that count."""
    counted = list(tries)[WARM_UP:]
    return {name: statistics.median(each[name] for each in counted) for name in counted[0]}


def process_gib() -> float:
    """The most main memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run_role(role: Any, kind: Any, shape: str, config: Any, training: Any, parallel: Any, block: Any) -> dict[str, Any]:
    """What one model's tries gave; it is gone afterwards."""
    model = make_model(kind, shape, config, training, parallel)
    last = middle(measure(role, model, config, training, parallel, block))
    if training.eight_bit_activations and role.ROLE == "actor":
        last["gradient_error"] = gradient_error(model, training, parallel, block)
    return last


def gradient_error(model: Any, training: Any, parallel: Any, block: Any) -> float:
    """How far 8 bits move this rank's part of a micro-batch's gradient, in parts of its norm."""
    import torch

    from shared.training.engine import my_shares
    from shared.training.regions import local
    from shared.training.sequences import collate
    from shared.training.sharding import device_of

    micro, gradients = my_shares(block, training, parallel)[0].rows, []
    for model.in_8_bits in (True, False):
        model.zero_grad()
        (-model(collate(micro, device_of(model, parallel)), 1.0).logprobs_BT.mean()).backward()
        gradients.append([local(p.grad) for p in model.parameters() if p.grad is not None])
    pairs = list(zip(*gradients, strict=True))
    off = sum(float((a - b).square().sum(dtype=torch.float64)) for a, b in pairs)
    return (off / sum(float(b.square().sum(dtype=torch.float64)) for _, b in pairs)) ** 0.5


def free() -> None:
    from shared.training.device import free_memory

    gc.collect()
    free_memory()


def line(row: dict[str, Any], columns: Iterable[str]) -> str:
    def show(name: str) -> str:
        value = row.get(name)
        if value is None:
            return ""
        if name.endswith("_mfu"):
            return f"{value:.1%}"
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    shown = [show(name) for name in columns]
    if "error" in row:
        shown[4] = f"out of memory: {row['error'][:90]}"
    return f"| {' | '.join(shown)} |"


def run_rank(job: dict[str, Any], rank: int) -> None:
    """One process: all lines; rank 0 prints them."""
    import torch
    import torch.distributed as dist

    from shared.config import ParallelConfig
    from shared.training.device import prepare
    from shared.training.group import Group
    from shared.training.parallel import plan_parallel

    prepare(job["threads"])
    group = Group(rank, job["ranks"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    if job["ranks"] > 1:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, init_method=f"tcp://127.0.0.1:{job['port']}", rank=rank, world_size=job["ranks"]
        )
        group.control = dist.new_group(backend="gloo")
    results = []
    for shape, recompute in job["lines"]:
        parallel = plan_parallel(ParallelConfig(**job["parallel"]), group, "parallel")
        row = run_row(shape, recompute, parallel, job)
        if job["trl"]:
            add_trl(row, job)
        results.append(row)
        if rank == 0:
            print(line(row, job["columns"]), flush=True)
            if job["json"]:
                title = f"PPO update, {job['rows']} rows, {job['prompt']} + {job['response']} tokens, {job['dtype']}"
                about = {"title": title, "device": device_name(), "torch": torch.__version__, "results": results}
                if job["trl"]:
                    about["trl"] = importlib.metadata.version("trl")
                Path(job["json"]).write_text(json.dumps(about, indent=1) + "\n")
        if "error" in row and job["ranks"] > 1:
            # The others wait for this rank in the middle of the line.
            print(f"rank {rank}: {row['error']}", file=sys.stderr, flush=True)
            os._exit(1)
    if job["ranks"] > 1:
        # Taking groups down in order would wait for a rank that ran out of memory.
        os._exit(0)


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="tiny", help="of " + ", ".join(SHAPES))
    parser.add_argument("--recompute", default="yes,no", help="activation checkpointing: yes, no or both")
    for name, default in (("--rows", 32), ("--prompt", 512), ("--response", 256), ("--ranks", 1), ("--threads", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--micro", type=int, help="rows per micro-batch; default by shape")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--shard", type=int, help="ranks of one copy; default: all")
    parser.add_argument("--accumulate", default="sharded", choices=("sharded", "whole"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eight-bit", action="store_true", help="activations in 8 bits; shows the gradient's error")
    parser.add_argument("--uneven", action="store_true", help="responses of 1 to --response tokens")
    parser.add_argument("--padded", action="store_true", help="rows side by side, padded to the longest")
    parser.add_argument("--trl", action="store_true", help="the actor's update by TRL's trainer, too")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for all")
    parser.add_argument("--json", help="where results are written")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run_rank(json.loads(options.job[0]), int(options.job[1]))
        return 0
    with socket.create_server(("127.0.0.1", 0)) as free_port:
        port = free_port.getsockname()[1]
    lines = [(shape, word == "yes") for shape in options.shapes.split(",") for word in options.recompute.split(",")]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    if options.trl:
        if importlib.util.find_spec("trl") is None:
            parser.error("--trl needs a package that is not here: pip install trl")
        if options.ranks > 1 or any(options.rows % (options.micro or MICRO[line]) for line in lines):
            parser.error("--trl needs --ranks 1 and --rows that --micro divides")
        # With more devices in sight the trainer would want all of them; and it would tell its makers of this run.
        environment = {"CUDA_VISIBLE_DEVICES": "0", **environment, "HF_HUB_OFFLINE": "1"}
    columns = COLUMNS + BESIDE_TRL * options.trl
    job = vars(options) | {
        "lines": lines,
        "columns": columns,
        "parallel": {name: getattr(options, name) for name in ("tp", "cp", "pp", "shard", "accumulate")},
        "port": port,
    }  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment, cwd=ROOT) for rank in range(options.ranks)]
    until = time.monotonic() + options.timeout
    try:
        # One that fails leaves the others waiting for it.
        while (codes := [rank.poll() for rank in ranks]) and None in codes and not any(codes):
            if time.monotonic() > until:
                print(f"not done within {options.timeout:g} s", file=sys.stderr)
                return 1
            time.sleep(0.1)
        return max(abs(code or 0) for code in codes)
    finally:
        for rank in ranks:
            rank.kill()


if __name__ == "__main__":
    sys.exit(main())
