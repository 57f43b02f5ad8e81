"""A port of loopback for a server that comes, goes and comes back while other processes take ports, too."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """A port that no other process is given as a free one, whether a server of the test listens there or not.

    Connections are refused while none does; gRPC, Redis and asyncio can bind it, since they set SO_REUSEADDR.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]
