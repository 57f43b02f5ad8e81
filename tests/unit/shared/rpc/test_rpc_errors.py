"""Errors keep class, text and details over the wire."""

import json

import grpc
import pytest

from shared.rpc import errors
from shared.rpc.errors import SextetError, from_status, status_message, trailing_metadata


@pytest.mark.parametrize("kind", sorted(SextetError.kinds.values(), key=lambda kind: kind.__name__))
def test_round_trip(kind: type[SextetError]) -> None:
    sent = kind("what and why", endpoint="h:1", block="b")
    ((key, payload),) = trailing_metadata(sent)
    received = from_status(sent.code, status_message(sent), payload)
    assert key.endswith("-bin")
    assert type(received) is kind
    assert (str(received), received.details) == ("what and why", {"endpoint": "h:1", "block": "b"})


@pytest.mark.parametrize("payload", [None, b"", b"\xff\xfe", b"[]", b"7", b'{"kind": 3, "details": 4}', b"{" * 5000])
def test_strange_trailers_fall_back_to_the_status(payload: bytes | None) -> None:
    error = from_status(grpc.StatusCode.NOT_FOUND, "gone", payload)
    assert type(error) is errors.NotFound
    assert str(error) == "gone"


def test_a_kind_that_contradicts_the_status_is_not_believed() -> None:
    payload = json.dumps({"kind": "StaleEpoch", "details": {"epoch": "1"}}).encode()
    error = from_status(grpc.StatusCode.UNAVAILABLE, "x", payload)
    assert type(error) is errors.Unavailable


def test_what_goes_into_trailers_is_bounded() -> None:
    sent = errors.InvalidArgument("x" * 100_000, **{f"key{i}": "y" * 10_000 for i in range(100)})
    ((_, payload),) = trailing_metadata(sent)
    assert len(status_message(sent)) <= errors.MAX_MESSAGE
    assert len(payload) < 6000


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_has_a_class(code: grpc.StatusCode) -> None:
    assert isinstance(from_status(code, "x"), SextetError)
