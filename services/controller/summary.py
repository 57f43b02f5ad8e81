"""The step's line of numbers, `metrics.jsonl`, and the summary of a run: where the time went."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.controller import verbs
from services.controller.calls import Result
from services.controller.journal import append_line
from services.controller.telemetry import (
    CALL_SECONDS,
    MISMATCH,
    OVERLAP,
    RANK_SECONDS,
    REWARD,
    STALENESS,
    STEP_SECONDS,
    STEPS,
    TOKENS_PER_SECOND,
)
from shared.batch.refs import row_tokens
from shared.places import write_atomically

CALLS = frozenset(verb.name for verb in verbs.FLOW_VERBS) | {"sync_weights"}
BOOKKEEPING = frozenset({"metrics", "warmup", "keep", "join", "overlap"})
MEASURES = frozenset({"kl", "k3_kl", "logprob_abs_difference", "logprob_abs_difference_max", "ess", "chi2_token"})
"""Of what `shared/algo/correction.py` says about the rollout's log-probs: those that are exported."""
RANK_SECONDS_OF = {
    f"{verb.name}/rank_seconds_{extreme}": (verb.name, rank)
    for verb in (verbs.ACTOR_UPDATE, verbs.CRITIC_UPDATE)
    for extreme, rank in (("max", "slowest"), ("min", "fastest"))
}
"""Numbers of a step that are exported by call and rank."""
SAMPLES = frozenset({"rollout.generate", "rollout.ready"})
"""Calls whose rows are those that the step trains on."""


HEADLINES = {
    "reward": ("reward.score/mean", "actor.advantages/score_mean"),
    "kl": ("actor.advantages/kl", "actor.update/kl"),
    "response_length": ("actor.advantages/response_length", "rollout.generate/response_length"),
}


def headlines(metrics: Mapping[str, float]) -> dict[str, float]:
    """What everybody wants to see first, under one name whatever the flow; the first source that is there."""
    found = {name: [metrics[source] for source in sources if source in metrics] for name, sources in HEADLINES.items()}
    return {name: values[0] for name, values in found.items() if values}


def measure(metrics: Mapping[str, float], results: list[Result]) -> None:
    """Passes a committed step's numbers on to Prometheus."""
    STEPS.inc()
    STEP_SECONDS.observe(metrics["seconds"])
    TOKENS_PER_SECOND.set(metrics["tokens_per_second"])
    if "reward" in metrics:
        REWARD.set(metrics["reward"])
    for name, value in metrics.items():
        measured = name.removeprefix("actor.advantages/rollout_")
        if measured in MEASURES:
            MISMATCH.labels(measured).set(value)
        elif name in RANK_SECONDS_OF:
            RANK_SECONDS.labels(*RANK_SECONDS_OF[name]).set(value)
        elif name.endswith("/staleness_max"):
            STALENESS.set(value)
        elif name == "overlap/share":
            OVERLAP.set(value)
    for result in results:
        if result.call in CALLS:
            CALL_SECONDS.labels(result.call).observe(result.seconds)


class Summary:
    """Collects steps; a run that was interrupted reads its own lines back.

    Args:
        directory: the run's directory.
    """

    def __init__(self, directory: Path) -> None:
        self._metrics, self._path = directory / "metrics.jsonl", directory / "summary.json"

    def add(self, step: int, outcome: Result, results: list[Result], seconds: float) -> dict[str, float]:
        """Appends a committed step; returns its numbers: headlines, the flow's, seconds, tokens, tokens_per_second."""
        generated = [result.ref for result in results if result.call in SAMPLES and result.ref]
        tokens = sum(sum(row_tokens(ref).values()) for ref in generated)
        metrics = {
            **headlines(outcome.metrics),
            **outcome.metrics,
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
        }
        calls: dict[str, float] = defaultdict(float)
        for result in results:
            if result.call not in BOOKKEEPING:
                calls[result.call] += result.seconds
        line = {"step": step, **metrics, "calls": calls}
        append_line(self._metrics, json.dumps(line).encode() + b"\n")
        return metrics

    def lines(self) -> list[dict[str, Any]]:
        """One line per step: of a step that was played again after a rollback, the last."""
        if not self._metrics.exists():
            return []
        latest: dict[int, dict[str, Any]] = {}
        for text in self._metrics.read_text().splitlines():
            line = json.loads(text)
            latest[line["step"]] = line
        return [latest[step] for step in sorted(latest)]

    def write(self) -> None:
        """Writes summary.json: seconds of every call (all, mean, longest), and first, last and mean of all numbers."""
        lines = self.lines()
        calls: dict[str, list[float]] = defaultdict(list)
        numbers: dict[str, list[float]] = defaultdict(list)
        for line in lines:
            for name, value in line.items():
                if name == "calls":
                    for call, seconds in value.items():
                        calls[call].append(seconds)
                elif name != "step":
                    numbers[name].append(value)
        wall = sum(line["seconds"] for line in lines)
        summary = {
            "steps": len(lines),
            "seconds": wall,
            "tokens_per_second": sum(line["tokens"] for line in lines) / wall if wall else 0.0,
            "calls": {
                call: {"seconds": sum(spent), "mean": sum(spent) / len(spent), "max": max(spent), "steps": len(spent)}
                for call, spent in sorted(calls.items())
            },
            "metrics": {
                name: {"first": values[0], "last": values[-1], "mean": sum(values) / len(values)}
                for name, values in sorted(numbers.items())
            },
        }
        write_atomically(self._path, json.dumps(summary, indent=1).encode())
