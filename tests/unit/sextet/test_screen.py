"""The live panel: only seen on a terminal, so nothing else would notice when it breaks."""

import io
import time
from typing import Any

import pytest
from rich.console import Console

from sextet import screen
from sextet.progress import Progress
from shared.gen.sextet.v1 import controller_pb2 as pb
from shared.rpc.errors import Unavailable


class FakeClient:
    """Answers once, and is away from then on."""

    def __init__(self) -> None:
        self.asked = 0

    def services(self) -> list[pb.ServiceInfo]:
        self.asked += 1
        if self.asked > 1:
            raise Unavailable("gone")
        return [pb.ServiceInfo(role="actor", replica="actor-0", running=1), pb.ServiceInfo(role="critic", replica="c")]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_is_shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    page = io.StringIO()
    monkeypatch.setattr(screen, "console", Console(file=page, force_terminal=terminal, width=100))
    monkeypatch.setattr(screen, "BUSY_SECONDS", 0.01)
    client: Any = FakeClient()
    progress = Progress("r1", "demo", 2)
    with screen.screen(client, progress) as shown:
        shown.show(pb.RunEvent(kind="state", message="running"))
        shown.show(pb.RunEvent(kind="step", step=1, message="step 1 of 2", metrics={"reward": 0.5, "seconds": 1.0}))
        until = time.monotonic() + 10
        while terminal and client.asked < 3 and time.monotonic() < until:
            time.sleep(0.01)
    text = page.getvalue()
    assert "0.500" in text
    assert ("busy now" in text and "actor-0" in text) is terminal
