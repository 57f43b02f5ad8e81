"""Errors that keep their meaning across gRPC: a status code, a sentence for a person, and details for programs.

A server turns them into a status with trailing metadata `sextet-error-bin` (JSON); a client turns that back into the
same class. Whatever else a peer answers becomes the class of its status code.
"""

import json
from typing import ClassVar

import grpc

METADATA_KEY = "sextet-error-bin"
# Trailers travel in HTTP/2 headers, which peers cap at 8 KiB.
MAX_MESSAGE, MAX_DETAILS, MAX_DETAIL = 1500, 16, 200


class SextetError(Exception):
    """Base of all errors that cross the wire.

    Attributes:
        code: the gRPC status it travels as.
        details: short facts for programs (endpoint, block, run, ...).
        retryable: trying the same operation again may succeed.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    retryable: ClassVar[bool] = False
    kinds: ClassVar[dict[str, type["SextetError"]]] = {}

    def __init__(self, message: str, **details: str) -> None:
        super().__init__(message)
        self.details = details

    def __init_subclass__(cls) -> None:
        SextetError.kinds[cls.__name__] = cls


class InvalidArgument(SextetError):
    """The request can't be right, whatever the state."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(SextetError):
    """What the request names is not here."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(SextetError):
    """What the request makes is there already."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(SextetError):
    """The state does not allow it; the same call will not do until the state is changed."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Unavailable(SextetError):
    """A peer or a store is not reachable, or is going away."""

    code = grpc.StatusCode.UNAVAILABLE
    retryable = True


class ResourceExhausted(SextetError):
    """A bounded queue or memory is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class DeadlineExceeded(SextetError):
    """The attempt's time is over; the operation itself may go on."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    retryable = True


class Aborted(SextetError):
    """Given up before it was applied."""

    code = grpc.StatusCode.ABORTED
    retryable = True


class Cancelled(SextetError):
    """The caller gave the attempt up."""

    code = grpc.StatusCode.CANCELLED


class Internal(SextetError):
    """A defect; the peer's log has the traceback."""

    code = grpc.StatusCode.INTERNAL


class Unauthenticated(SextetError):
    """The token is missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(SextetError):
    """The peer is known and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unimplemented(SextetError):
    """This service does not have the method."""

    code = grpc.StatusCode.UNIMPLEMENTED


class GroupEnds(Unavailable):
    """The ranks of a replica end, and its state with them, since one of them failed alone: the text is its reason."""


class StaleEpoch(FailedPrecondition):
    """A controller of an older term spoke. Details: epoch, highest."""


class PayloadMismatch(FailedPrecondition):
    """An operation id was used again for other work. Details: run, step, name, part."""


class VersionGap(FailedPrecondition):
    """A change of state is for another version than the role is at. Details: base_version, version."""


class NotFinite(FailedPrecondition):
    """A loss or a gradient is NaN or infinite; nothing was changed."""


class DamagedCheckpoint(FailedPrecondition):
    """A checkpoint is torn, changed, or of something else: another one may do, and the same one never will."""


class PartlyApplied(FailedPrecondition):
    """The work failed after it changed state. Kept as the operation's result: only a restored checkpoint helps."""


class BatchLost(NotFound):
    """A block is gone (released, or its maker died). Details: endpoint, block."""


_BY_CODE: dict[grpc.StatusCode, type[SextetError]] = {
    kind.code: kind for kind in SextetError.kinds.values() if kind.__base__ is SextetError
}


def status_message(error: SextetError) -> str:
    """The sentence, cut to what a trailer may carry."""
    text = str(error)
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def trailing_metadata(error: SextetError) -> tuple[tuple[str, bytes], ...]:
    """Kind and details as the trailer that `from_status` reads."""
    details = {key: str(value)[:MAX_DETAIL] for key, value in list(error.details.items())[:MAX_DETAILS]}
    return ((METADATA_KEY, json.dumps({"kind": type(error).__name__, "details": details}).encode()),)


def from_status(code: grpc.StatusCode, message: str, payload: bytes | None = None) -> SextetError:
    """The error that a peer raised; falls back to the class of the status code when the trailer can't be read."""
    by_code = _BY_CODE.get(code, SextetError)
    try:
        content = json.loads(payload) if payload else {}
        kind = SextetError.kinds.get(content.get("kind", ""), by_code)
        details = {str(key): str(value) for key, value in content.get("details", {}).items()}
    except (ValueError, AttributeError):
        return by_code(message)
    # A peer may know kinds that this version doesn't, but never one that contradicts its own status.
    return (kind if kind.code == code else by_code)(message, **details)
