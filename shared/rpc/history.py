"""What a role has applied: what it remembers of its last change of state, and a line on disk for each of them."""

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from shared.failpoints import hit
from shared.gen.sextet.v1 import common_pb2

log = structlog.get_logger()
MAX_BYTES = 8 << 20
"""Of one file; the one before it is kept beside it."""
_PACKAGE = "sextet.v1."


@dataclass(frozen=True)
class Applied:
    """A change of state that was made.

    Attributes:
        id: the operation.
        epoch: the term it was asked for in.
        digest: of its payload (see `payload_digest`).
        response: its result.
    """

    id: common_pb2.OperationId
    epoch: int
    digest: bytes
    response: Message

    def fields(self) -> dict[str, Any]:
        """As JSON values: what a checkpoint keeps."""
        return {
            "run": self.id.run,
            "step": self.id.step,
            "name": self.id.name,
            "part": self.id.part,
            "epoch": self.epoch,
            "payload": self.digest.hex(),
            "type": self.response.DESCRIPTOR.full_name,
            "result": base64.b64encode(self.response.SerializeToString(deterministic=True)).decode(),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Applied | None":
        """What `fields` said; None when it is of a version that kept less, or no answer of ours."""
        try:
            name = str(fields["type"])
            if not name.startswith(_PACKAGE):
                raise ValueError(f"{name!r} is no message of {_PACKAGE}*")
            kind = message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))
            id = common_pb2.OperationId(**{key: fields[key] for key in ("run", "step", "name", "part")})
            response = kind.FromString(base64.b64decode(fields["result"], validate=True))
            return cls(id, int(fields["epoch"]), bytes.fromhex(fields["payload"]), response)
        except (KeyError, ValueError, TypeError, DecodeError) as error:
            log.warning("the last applied operation of a checkpoint is not understood", error=str(error))
            return None


class History:
    """An append-only file of what a process applied, a JSON line each; bounded, for people and validators.

    It is a record, not a source of truth: when it cannot be written, the work that is done stays done.

    Args:
        path: of the file; `.1` is added to the one before it.
    """

    def __init__(self, path: Path, incarnation: str) -> None:
        self._path, self._incarnation = path, incarnation

    def add(self, applied: Applied, prompts: list[str]) -> None:
        """Appends a line; `prompts` are the uids that the work was about."""
        fields = applied.fields() | {"incarnation": self._incarnation, "time": time.time(), "prompts": prompts}
        fields["version"] = getattr(applied.response, "version", None)
        line = json.dumps({key: value for key, value in fields.items() if key != "result"}, separators=(",", ":"))
        hit(f"{applied.id.name}.before_history")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size > MAX_BYTES:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
            with self._path.open("ab", buffering=0) as file:
                file.write(line.encode() + b"\n")
        except OSError as error:
            log.warning("history not written", path=str(self._path), error=str(error))
        hit(f"{applied.id.name}.after_history")
