"""A run on the screen: a live panel on a terminal, plain lines elsewhere."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sextet.client import Client
from sextet.progress import Progress, shown, sparkline
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.rpc.errors import SextetError

BUSY_SECONDS = 1.0
# Everything for people goes to stderr: stdout is for what scripts read.
console = Console(stderr=True, highlight=False)


class Screen(Protocol):
    """Shows events as they come."""

    def show(self, event: pb.RunEvent) -> None: ...


@contextlib.contextmanager
def screen(client: Client, progress: Progress) -> Iterator[Screen]:
    """A live panel when stderr is a terminal, else lines."""
    if not console.is_terminal:
        yield Lines(progress)
        return
    with Panels(client, progress) as panels:
        yield panels


class Lines:
    """A line for everything worth telling."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def show(self, event: pb.RunEvent) -> None:
        if line := self._progress.feed(event):
            tell(line)


class Panels:
    """Progress, numbers, curve, and who is busy right now."""

    def __init__(self, client: Client, progress: Progress) -> None:
        self._client, self._progress = client, progress
        self._over = threading.Event()
        self._now = ""
        self._live = Live(self._panel(), console=console, refresh_per_second=4)
        self._asking = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Self:
        self._live.start()
        self._asking.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._asking.join(BUSY_SECONDS)
        self._live.stop()

    def show(self, event: pb.RunEvent) -> None:
        line = self._progress.feed(event)
        if line and event.kind not in ("step", "state"):
            self._live.console.print(line, style="red" if event.kind == "error" else "dim")
        self._live.update(self._panel())

    def _ask(self) -> None:
        while not self._over.wait(BUSY_SECONDS):
            # Who is busy is nice to know: a controller that is away must not end the view.
            with contextlib.suppress(SextetError):
                services = self._client.services()
                self._now = " ".join(each.replica for each in services if each.running and each.role != "controller")
                self._live.update(self._panel())

    def _panel(self) -> RenderableType:
        progress = self._progress
        done = len(progress.steps)
        rows = Table.grid(padding=(0, 2))
        rows.add_row("state", f"{progress.state}  step {done} of {progress.total or '?'}")
        if done:
            last = max(progress.steps)
            for name, value in shown(progress.steps[last]).items():
                rows.add_row(name, value)
            rows.add_row("reward curve", Text(sparkline(progress.curve("reward"), 48), style="green"))
            rows.add_row("last step", progress.busy(last))
        rows.add_row("busy now", self._now or "-")
        bar = ProgressBar(total=progress.total or 1, completed=done, width=64)
        return Panel(Group(bar, rows), title=f"{progress.name} {progress.id}", title_align="left", width=100)


def tell(line: str, style: str = "") -> None:
    """A line for a person."""
    console.print(line, style=style, markup=False, soft_wrap=True)
