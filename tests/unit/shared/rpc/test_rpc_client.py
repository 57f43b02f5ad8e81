"""Whether anybody listens at an endpoint, and that a process can end whatever it was told to be one."""

import socket
import subprocess
import sys

import pytest

from shared.rpc.client import _refuses

WAITS = """
import asyncio
from shared.rpc.client import Connections
from shared.rpc.errors import InvalidArgument

async def main():
    connections = Connections("token")
    for endpoint in ("", "\\0", "ipv4:80", "127.0.0.1:9", "nowhere.invalid:80"):
        try:
            print(repr(endpoint), await connections.unreachable(endpoint, 0.05))
        except InvalidArgument as error:
            print(error)
    await connections.close()

asyncio.run(main())
"""


async def test_a_port_where_nobody_listens_any_more_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"127.0.0.1:{listening.getsockname()[1]}"
        assert not await _refuses(endpoint)
    assert await _refuses(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:99999", "127.0.0.1:-1", "nonsense", "a..b:80", f"{'h' * 300}:80", "name:80", ""]
)
async def test_what_is_no_address_is_left_to_the_channel(endpoint: str) -> None:
    """Found by 10,000 mutated messages: a port of 99,999 was an OverflowError."""
    assert not await _refuses(endpoint)


def test_a_process_that_has_waited_for_an_endpoint_that_is_none_comes_to_its_end() -> None:
    """HoldRows of 10,000 mutated messages: the process stood in gRPC's shutdown until it was killed."""
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "'' is no address: an endpoint is host:port",
        "'\\x00' is no address: an endpoint is host:port",
        "'ipv4:80' is no address: an endpoint is host:port",
        "'127.0.0.1:9' nobody listens there any more",
        "'nowhere.invalid:80' no connection within 0.05 s",
    ]
