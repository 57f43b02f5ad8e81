"""A controller that can't start says why in a line."""

from pathlib import Path

import pytest

from services.controller.service import run
from services.controller.settings import ControllerSettings
from shared.rpc.server import EXIT_UNREACHABLE
from shared.state.embedded import start_redis


async def test_a_redis_that_refuses_the_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was a traceback, and not the exit code of a Redis that can't be used."""
    server = start_redis(tmp_path)
    try:
        url = f"redis://:another@127.0.0.1:{server.port}/0"
        settings = ControllerSettings.model_validate({"token": "t", "redis_url": url, "metrics_port": -1})
        assert await run(settings) == EXIT_UNREACHABLE
    finally:
        server.stop()
    assert "refuses the password" in capsys.readouterr().err
