"""What a checkpoint costs training: the stall of its copy, and how much slower steps are while it is written.

    python bench/checkpoint.py --megabytes 500 --directory /tmp/checkpoint --steps 8

A Llama with random weights, sized so that parameters and AdamW's moments take --megabytes, is trained on random rows;
its state is copied and written as the actor does it. Figures: seconds of the copy into new and used memory, of a write
alone, of a step without and beside a write, and the stall as a share of training at some intervals. A write ends with
fsync: name a directory on a disk like yours.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
INTERVALS = (1, 5, 20, 100)
VOCABULARY, WIDTH, LAYERS = 32000, 512, 8
STATE_BYTES = 12
"""Of a parameter: float32 master weight and two moments."""


def make_engine(megabytes: int) -> Any:
    """A policy in training whose state is about so large."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shared.config import OptimizerConfig, TrainingConfig
    from shared.training.device import pick_device
    from shared.training.engine import Engine
    from shared.training.models import Policy

    left = megabytes * 10**6 / STATE_BYTES - 2 * VOCABULARY * WIDTH - LAYERS * 4 * WIDTH**2
    if left <= 0:
        sys.exit(f"--megabytes {megabytes} is less than the vocabulary takes: give 500 or more")
    settings = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=int(left / LAYERS / 3 / WIDTH),
        num_hidden_layers=LAYERS, num_attention_heads=8,
    )  # fmt: skip
    torch.manual_seed(0)
    policy = Policy(LlamaForCausalLM(settings), torch.float32).to(pick_device("auto"))
    config = TrainingConfig(optimizer=OptimizerConfig(lr=1e-4), micro_batch_size=4)
    return Engine(policy, config, seed=0, norm_length=64)


def make_loss(engine: Any) -> Any:
    """Likelihood of random responses."""
    from shared.algo import aggregate
    from shared.training.sequences import collate, per_token

    def loss(micro: Any, totals: Any) -> Any:
        import torch

        mask_BT = per_token(micro, "response_mask", engine.device)
        logprobs_BT = engine.model(collate(micro, engine.device), 1.0).logprobs_BT
        every_B = torch.ones(len(micro), dtype=torch.bool, device=engine.device)
        return aggregate(-logprobs_BT, mask_BT, every_B, "token-mean", totals), {}

    return loss


def timed(work: Callable[[], Any]) -> float:
    import torch

    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(engine: Any, step: Callable[[], Any], directory: Path, steps: int) -> dict[str, float]:
    """All figures; every write replaces the one before."""
    from shared.places import Local
    from shared.training.saving import StateCopy

    copy = StateCopy("actor")

    def take() -> None:
        copy.take(engine.model, engine.optimizer, {})

    step()
    first = timed(take)
    copies = [timed(take) for _ in range(5)]
    alone = [timed(step) for _ in range(steps)]
    # Writes may take minutes.
    print(f"copy {statistics.median(copies):.3g} s, step {statistics.median(alone):.3g} s", flush=True)
    size = copy.write(Local(directory)).bytes
    write = timed(lambda: copy.write(Local(directory)))
    stop = threading.Event()

    def write_on() -> None:
        while not stop.is_set():
            copy.write(Local(directory))

    writer = threading.Thread(target=write_on)
    writer.start()
    beside = [timed(step) for _ in range(steps)]
    stop.set()
    writer.join()
    again = [timed(step) for _ in range(steps)]
    return {
        "megabytes": size / 1e6, "first_copy_s": first, "copy_s": statistics.median(copies), "write_s": write,
        "step_s": statistics.median([*alone, *again]), "step_beside_s": statistics.median(beside),
    }  # fmt: skip


def report(figures: dict[str, float]) -> str:
    copy, step, write = figures["copy_s"], figures["step_s"], figures["write_s"]
    slower = write * max(0.0, 1 - step / figures["step_beside_s"])
    lines = ["| figure | value |", "| --- | --- |", *(f"| {name} | {value:.3g} |" for name, value in figures.items())]
    lines += [
        "",
        "| checkpoint every | stall of the copy | and of steps slowed by the write |",
        "| --- | --- | --- |",
    ]
    for interval in INTERVALS:
        # The write can't take longer than the steps that it is beside.
        cost = copy + min(slower, interval * step)
        lines.append(f"| {interval} steps | {copy / (interval * step):.2%} | {cost / (interval * step):.2%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--directory", type=Path, required=True, help="is replaced")
    parser.add_argument("--rows", type=int, default=16, help="of an update; 32 + 64 tokens each")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()

    from bench.training import make_batch
    from shared.training.device import prepare

    prepare(options.threads)
    engine, block = make_engine(options.megabytes), make_batch(options.rows, 32, 64, uneven=False)
    loss = make_loss(engine)
    print(report(measure(engine, lambda: engine.update(block, loss, step=1), options.directory, options.steps)))


if __name__ == "__main__":
    main()
