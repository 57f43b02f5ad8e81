"""Whether anybody listens at an endpoint."""

import socket

import pytest

from shared.rpc.client import _refuses


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
