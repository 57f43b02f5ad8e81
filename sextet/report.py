"""The end of a run: where the time went, what became of the reward, a picture of it. And what profilers have seen."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sextet.progress import Progress
from shared.gen.sextet.v1 import controller_pb2 as pb

ENDS = 5
"""Steps whose mean stands for the beginning and for the end."""
SHOWN = 5
"""Operators or kernels of a call."""


def summary(progress: Progress) -> RenderableType:
    """Numbers at both ends of the run, and seconds of every role call."""
    numbers = Table(
        title=f"run {progress.id}: {progress.state} after {len(progress.steps)} steps", title_justify="left"
    )
    for head in ("", "first step", f"first {ENDS} steps", f"last {ENDS} steps"):
        numbers.add_column(head, justify="left" if not head else "right")
    for name, label, form in (
        ("reward", "mean reward", "{:.3f}"),
        ("kl", "KL to the reference", "{:.4f}"),
        ("response_length", "response length, tokens", "{:.1f}"),
        ("tokens_per_second", "tokens/s", "{:,.0f}"),
        ("seconds", "seconds a step", "{:.2f}"),
    ):
        if curve := progress.curve(name):
            means = (mean(part) for part in (curve[:1], curve[:ENDS], curve[-ENDS:]))
            numbers.add_row(label, *(form.format(value) for value in means))
    return Group(numbers, call_table(progress))


def call_table(progress: Progress) -> Table:
    """Seconds of every role call; calls of a step run side by side where they can."""
    table = Table(title="where the time went (calls run side by side)", title_justify="left")
    for head in ("role call", "seconds", "mean a step", "longest", "of wall time"):
        table.add_column(head, justify="left" if head == "role call" else "right")
    wall = sum(progress.curve("seconds"))
    for call, seconds in sorted(progress.calls().items(), key=lambda item: -sum(item[1])):
        share = f"{sum(seconds) / wall:.0%}" if wall else ""
        table.add_row(call, f"{sum(seconds):.1f}", f"{mean(seconds):.3f}", f"{max(seconds):.3f}", share)
    table.add_row("steps", f"{wall:.1f}", f"{wall / max(1, len(progress.steps)):.3f}", "", "100%", style="bold")
    return table


def profile_report(calls: Sequence[pb.CallProfile]) -> RenderableType:
    """What the profilers have seen: every rank's shares, and what the one that others wait for spent its time in."""
    ranks = Table(title="parts of the seconds; who waits for a slow rank communicates more", title_justify="left")
    for head in ("step", "call", "rank"):
        ranks.add_column(head, no_wrap=True)
    for head in ("seconds", "commun.", "compute", "peak GiB"):
        ranks.add_column(head, justify="right", no_wrap=True)
    tops = Table(title="where the rank that communicates least spent its time", title_justify="left")
    for head in ("call", "operator or kernel"):
        tops.add_column(head)
    for head in ("seconds", "calls"):
        tops.add_column(head, justify="right", no_wrap=True)
    faults = []
    for call in calls:
        for rank in call.ranks:
            name, shares = f"{call.replica}/{rank.rank}", (rank.communication_share, rank.compute_share)
            numbers = f"{rank.seconds:.3f}", *(f"{share:.1%}" for share in shares), f"{rank.memory_peak_gib:.2f}"
            ranks.add_row(str(call.step), call.call, name, *numbers)
            faults += [f"no trace of step {call.step}, {call.call}, {name}: {rank.fault}"] if rank.fault else []
        seen = sorted((rank for rank in call.ranks if not rank.fault), key=lambda rank: rank.communication_share)
        for top in seen[0].top[:SHOWN] if seen else ():
            tops.add_row(call.call, top.name, f"{top.seconds:.3f}", str(top.calls))
    # A fault's words are no markup.
    return Group(ranks, tops, *map(Text, faults))


def picture(progress: Progress, path: Path) -> Path | None:
    """Reward and KL over the steps as a PNG; None without them, matplotlib (extra `examples`), or room for it."""
    panels = [(name, curve) for name in ("reward", "kl") if (curve := progress.curve(name))]
    if not panels:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, curve) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        axes.plot(range(1, len(curve) + 1), curve, marker=".", color="tab:green" if name == "reward" else "tab:blue")
        axes.set(xlabel="step", ylabel="mean reward" if name == "reward" else "KL to the reference")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{progress.name} {progress.id}")
    try:
        figure.savefig(path, dpi=120)
    except OSError:
        # The run is over, whatever becomes of its picture.
        return None
    return path


def places(progress: Progress, directory: Path, logs: Path | None) -> dict[str, str]:
    """What the run left, by name; only what is there."""
    found = {
        "model": directory / "model",
        "checkpoint": Path(progress.checkpoint) if progress.checkpoint else None,
        "metrics": directory / "metrics.jsonl",
        "summary": directory / "summary.json",
        "logs": logs,
    }
    return {name: str(path) for name, path in found.items() if path is not None and path.exists()}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
