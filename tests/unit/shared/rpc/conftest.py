"""Fixtures of the rpc tests."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes.role import RunningRole, fake_role


@pytest_asyncio.fixture
async def role() -> AsyncIterator[RunningRole]:
    """A served fake role."""
    async with fake_role() as running:
        yield running


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch) -> None:
    """No test reads or writes the user's ~/.sextet or environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("SEXTET_TOKEN", "SEXTET_TOKEN_FILE", "SEXTET_REDIS_URL", "SEXTET_PARENT_PID", "SEXTET_BIND"):
        monkeypatch.delenv(name, raising=False)
