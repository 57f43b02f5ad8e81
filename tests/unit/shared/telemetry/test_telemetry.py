"""JSON logs with what is being done, bounded metric labels, and the metrics endpoint."""

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
import structlog
from prometheus_client import REGISTRY

from shared.telemetry import logs, metrics


@pytest.fixture
def configured() -> Iterator[None]:
    """Logging as a service sets it up; pytest's own handlers come back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logs.configure("actor", "actor-1", "info")
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def events(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_events_are_json_lines_with_context(configured: None, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("actor", "actor-1", "info")
    with structlog.contextvars.bound_contextvars(run="r", step=3, operation="actor.update"):
        structlog.get_logger().info("call", seconds=1.5, text="line\nbreak")
        logging.getLogger("some.library").warning("from %s", "a library", extra={"k": 1})
    structlog.get_logger().debug("not shown")
    try:
        raise ZeroDivisionError("x")
    except ZeroDivisionError:
        structlog.get_logger().exception("failed")
    call, library, failed = events(capsys)
    expected = {"role": "actor", "replica": "actor-1", "run": "r", "step": 3, "operation": "actor.update"}
    assert {key: call[key] for key in expected} == expected
    assert (call["event"], call["seconds"], call["text"], call["level"]) == ("call", 1.5, "line\nbreak", "info")
    assert call["timestamp"].endswith("Z")
    assert {key: library[key] for key in expected} == expected
    assert (library["event"], library["k"]) == ("from a library", 1)
    assert "run" not in failed
    assert "ZeroDivisionError: x" in failed["exception"]


def test_label_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_names", set())
    values = {metrics.bounded(f"name-{n}") for n in range(1000)}
    assert len(values) == 65
    assert metrics.bounded("name-0") == "name-0"
    assert metrics.bounded("name-999") == "other"


def test_every_metric_has_our_prefix_and_a_base_unit() -> None:
    ours = [family for family in REGISTRY.collect() if family.name.startswith("sextet")]
    assert len(ours) >= 7
    for family in ours:
        assert family.name.startswith("sextet_")
        assert family.documentation
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_bytes"))


def get(port: int, token: str | None = None) -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode()


def test_metrics_are_served_and_the_port_is_free_afterwards() -> None:
    server = metrics.MetricsServer("127.0.0.1", 0, None)
    assert "sextet_rpc_requests_total" in get(server.port)
    server.close()
    again = metrics.MetricsServer("127.0.0.1", server.port, None)
    again.close()


def test_with_a_token_metrics_need_it() -> None:
    server = metrics.MetricsServer("127.0.0.1", 0, "the-token-of-the-tests")
    for token in (None, "another-token", "the-token-of-the-testsX"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(server.port, token)
        assert caught.value.code == 401
        assert "sextet_" not in caught.value.read().decode()
    assert "sextet_" in get(server.port, "the-token-of-the-tests")
    server.close()
