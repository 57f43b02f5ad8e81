"""A local S3 server, and what its clients find in their environment."""

import contextlib
import os
from collections.abc import Iterator

import s3fs
from moto.server import ThreadedMotoServer

SETTINGS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """`s3://bucket`, in this process and in those that it starts."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    before = dict(os.environ)
    try:
        host, port = server.get_host_and_port()
        os.environ |= {**SETTINGS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
        # A client of an earlier server would be taken again.
        s3fs.S3FileSystem.clear_instance_cache()
        # All servers of a process have the same buckets.
        bucket = f"checkpoints-{port}"
        s3fs.S3FileSystem().mkdir(bucket)
        yield f"s3://{bucket}"
    finally:
        os.environ.clear()
        os.environ |= before
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
