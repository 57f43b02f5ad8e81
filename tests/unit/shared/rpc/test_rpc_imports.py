"""What every process imports stays small: no torch, no transformers, and numpy only where batches are."""

import subprocess
import sys

import pytest

LIGHT = [
    *(
        f"shared.rpc.{name}"
        for name in ("client", "errors", "interceptors", "operations", "role", "server", "settings")
    ),
    *("shared.state", "shared.state.redis", "shared.state.registry", "shared.state.embedded"),
    *("shared.telemetry.logs", "shared.telemetry.metrics", "shared.failpoints"),
]


@pytest.mark.parametrize(("modules", "forbidden"), [(LIGHT, ["torch", "numpy"]), (["shared.rpc.run"], ["torch"])])
def test_imports(modules: list[str], forbidden: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}; print([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
