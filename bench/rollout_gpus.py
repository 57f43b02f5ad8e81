"""All that issue 4 wants to know of a machine with two GPUs, in one call of less than eight minutes.

    python bench/rollout_gpus.py --json bench/results/rollout.json
    python bench/rollout_gpus.py --large tiny --small tiny --rows 4,8 --prompt 16 --response 8 --hf-rows 4  # on a CPU

Two services of the small shape have a GPU each. Then two lanes, a GPU each: one measures the service with the small and
then with the large shape, the other bare vLLM with both and Hugging Face generate with the large one. While a turn is
measured the next one's process does its imports. What is measured, and how, is bench/rollout.py's; a verdict at the end
compares each number with its target. What is not done when --seconds are over is left out.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.rollout import Child, take_turn, write_job
from bench.rollout_shapes import SHAPES

TRIES = {"large": 1, "small": 3}
OF_BARE, OF_HF, OF_ONE = 0.97, 4.0, 1.95
"""Targets: tokens per second of the service by bare vLLM's, by Hugging Face's, and of two replicas by one's."""


@dataclass
class Turn:
    """An engine with a shape, on these GPUs; `rows` is what was measured."""

    size: str
    engine: str
    gpus: tuple[int, ...]
    job: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)

    def start(self) -> None:
        """Its processes begin with their imports."""
        what = "serve" if "service" in self.engine else self.engine
        self.children = [Child(self.job, what, gpu) for gpu in self.gpus]

    def measure(self, end: float) -> None:
        """Its rows, as far as there is time until `end` on the monotonic clock."""
        take_turn(json.loads(self.job.read_text()), {self.engine: self.children}, {self.engine: self.rows}, end)


def play(turns: Sequence[Turn], end: float) -> None:
    """One after the other; the next one's imports are done meanwhile."""
    turns[0].start()
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        if following:
            following.start()
        turn.measure(end)


def speeds(turn: Turn, replicas: int = 1, likely: bool = False) -> dict[int, float]:
    """Tokens per second by rows; of bare vLLM without or with seeds and log-probs (`likely`)."""
    return {
        row["rows"]: row["tokens_per_second"]
        for row in turn.rows
        if row["replicas"] == replicas and row.get("likely", False) == likely
    }


def verdicts(turns: dict[str, Turn]) -> list[str]:
    """A line for each target; "not measured" where a number is missing."""
    found = []
    for size in ("large", "small"):
        service, bare = speeds(turns[f"{size} service"]), speeds(turns[f"{size} bare"])
        alike = speeds(turns[f"{size} bare"], likely=True)
        for rows in sorted(service.keys() | bare.keys()) or [0]:
            name = f"{size}, {rows} rows: service / bare vLLM"
            found.append(verdict(name, service.get(rows), bare.get(rows), OF_BARE))
            name += " with seeds and log-probs"
            found.append(verdict(name, service.get(rows), alike.get(rows), OF_BARE))
    hf, service = speeds(turns["large hf"]), speeds(turns["large service"])
    best = max(service.values(), default=None)
    found.append(verdict("large: service / Hugging Face generate", best, max(hf.values(), default=None), OF_HF))
    pair = turns["small pair"]
    for rows, one in speeds(pair).items() or [(0, None)]:
        found.append(verdict(f"small, {rows} rows each: two replicas / one", speeds(pair, 2).get(rows), one, OF_ONE))
    return found


def verdict(name: str, value: float | None, base: float | None, target: float) -> str:
    """A row of the table of targets."""
    if not value or not base:
        return f"| {name} | not measured | {target:g} | |"
    return f"| {name} | {value / base:.3f} | {target:g} | {'met' if value / base >= target else 'NOT met'} |"


def measured(turns: dict[str, Turn]) -> list[str]:
    """Every number."""
    return [
        f"| {turn.size} {turn.engine}{', seeds and log-probs' if row.get('likely') else ''} "
        f"| {row['rows']} x {row['replicas']} | {row['tokens_per_second']:,.0f} |"
        for turn in turns.values()
        for row in turn.rows
    ]


def make_turns(options: argparse.Namespace, work: Path) -> dict[str, Turn]:
    """By name; jobs are written."""
    jobs = {}
    for size in ("large", "small"):
        directory = work / size
        directory.mkdir()
        # The two replicas of the small shape are told by their processes: the job is the same.
        asked = {**vars(options), "shape": getattr(options, size), "model": None, "tries": TRIES[size]}
        # With the large shape log-probs cost nothing that can be seen, and a minute.
        asked["likely"] = size == "small"
        jobs[size] = write_job(argparse.Namespace(**asked), directory)
    return {
        "large service": Turn("large", "service-vllm", (0,), jobs["large"]),
        "small service": Turn("small", "service-vllm", (0,), jobs["small"]),
        "large bare": Turn("large", "bare", (1,), jobs["large"]),
        "small bare": Turn("small", "bare", (1,), jobs["small"]),
        "large hf": Turn("large", "hf", (1,), jobs["large"]),
        "small pair": Turn("small", "service-vllm", (0, 1), jobs["small"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--large", "13b"), ("--small", "1b")):
        parser.add_argument(name, default=default, choices=SHAPES)
    for name, default in (("--rows", "256,512"), ("--hf-rows", "128")):
        parser.add_argument(name, default=default, type=lambda text: [int(part) for part in text.split(",")])
    for name, default in (("--prompt", 512), ("--response", 256), ("--seconds", 480)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine-args", default={}, type=json.loads)
    parser.add_argument("--json", type=Path, help="where results are written")
    options = parser.parse_args()
    began = time.monotonic()
    end = began + options.seconds
    with tempfile.TemporaryDirectory() as work:
        turns = make_turns(options, Path(work))
        # What has been cut off most often comes first.
        play([turns["small pair"]], end)
        others = threading.Thread(target=play, args=([turns[n] for n in ("small bare", "large bare", "large hf")], end))
        others.start()
        play([turns["small service"], turns["large service"]], end)
        others.join()
    shapes = f"{options.large} and {options.small}, {options.prompt} in, {options.response} out, {options.dtype}"
    title = f"{shapes}; {time.monotonic() - began:.0f} s"
    head = ["| | ratio | target | |", "| --- | ---: | ---: | --- |"]
    print("\n".join(["", title, "", "| | rows | tokens/s |", "| --- | ---: | ---: |", *measured(turns)]))
    print("\n".join(["", *head, *verdicts(turns)]))
    if options.json:
        results = {name: turn.rows for name, turn in turns.items()}
        options.json.write_text(json.dumps({"title": title, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
