"""What a watched run looks like: lines, shares, curves, the closing tables, the picture."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from sextet.progress import Progress, sparkline
from sextet.report import picture, places, summary
from shared.gen.sextet.v1 import controller_pb2 as pb


def fed(*steps: tuple[int, float]) -> Progress:
    """A run of (step, reward): two seconds a step, one of rollout and half a second of actor and critic."""
    progress = Progress("r1", "demo", 0)
    progress.feed(pb.RunEvent(kind="state", message="running"))
    for step, reward in steps:
        for call, seconds in (("rollout.generate", 1.0), ("actor.logprobs", 0.25), ("actor.update", 0.25)):
            progress.feed(pb.RunEvent(kind="call", step=step, message=call, metrics={"seconds": seconds}))
        metrics = {"reward": reward, "kl": 0.01, "seconds": 2.0, "response_length": 4.0, "tokens_per_second": 1234.5}
        progress.feed(pb.RunEvent(kind="step", step=step, message=f"step {step} of 3", metrics=metrics))
    return progress


def test_a_step_is_a_line() -> None:
    line = fed((1, 0.25)).line(1)
    assert line.startswith("step 1/3  reward 0.250  kl 0.0100  length 4.0  tokens/s 1,234  seconds 2.00")
    assert line.endswith("rollout 50% actor 25%")


def test_state_checkpoint_and_error_are_kept() -> None:
    progress = fed((1, 0.5))
    progress.feed(pb.RunEvent(kind="checkpoint", step=1, message="/x/step_1"))
    assert progress.feed(pb.RunEvent(kind="error", message="no more")) == "error: no more"
    progress.feed(pb.RunEvent(kind="state", message="failed"))
    assert (progress.state, progress.reason, progress.checkpoint) == ("failed", "no more", "/x/step_1")


def test_a_rollback_takes_back_its_steps() -> None:
    progress = fed((1, 0.1), (2, 0.2), (3, 0.3))
    progress.feed(pb.RunEvent(kind="recovery", step=1, message="back", metrics={"lost_steps": 2.0}))
    assert progress.curve("reward") == [0.1]


def test_a_recovery_without_loss_keeps_them() -> None:
    progress = fed((1, 0.1), (2, 0.2))
    progress.feed(pb.RunEvent(kind="recovery", step=2, message="a replica died", metrics={"lost_steps": 0.0}))
    assert progress.curve("reward") == [0.1, 0.2]


def test_a_step_played_again_counts_its_calls_once() -> None:
    progress = fed((1, 0.1), (2, 0.2))
    progress.feed(pb.RunEvent(kind="recovery", step=1, message="back", metrics={"lost_steps": 1.0}))
    progress.feed(pb.RunEvent(kind="call", step=2, message="rollout.generate", metrics={"seconds": 3.0}))
    progress.feed(pb.RunEvent(kind="step", step=2, message="step 2 of 3", metrics={"reward": 0.3, "seconds": 4.0}))
    assert progress.calls()["rollout.generate"] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [([], 8, ""), ([1.0], 8, "▁"), ([0.0, 1.0], 8, "▁█"), ([0, 0, 1, 1], 2, "▁█"), ([2.0, 2.0], 4, "▁▁")],
)
def test_sparkline(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


def test_summary_has_both_ends_and_every_call() -> None:
    progress = fed(*((step, step / 10) for step in range(1, 11)))
    page = io.StringIO()
    Console(width=120, file=page).print(summary(progress))
    text = page.getvalue()
    rewards = next(line for line in text.splitlines() if "mean reward" in line)
    assert [part for part in rewards.replace("│", " ").split() if part[0].isdigit()] == ["0.100", "0.300", "0.800"]
    generate = next(line for line in text.splitlines() if "rollout.generate" in line)
    assert generate.replace("│", " ").split()[1:] == ["10.0", "1.000", "1.000", "50%"]


def test_picture_and_places(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = picture(fed((1, 0.1), (2, 0.9)), tmp_path / "reward.png")
    assert drawn is not None
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert picture(Progress("r", "r", 0), tmp_path / "none.png") is None
    (tmp_path / "metrics.jsonl").touch()
    assert places(fed((1, 0.1)), tmp_path, None) == {"metrics": str(tmp_path / "metrics.jsonl")}
