"""Operation ids (law 3): the same work gets the same id, also after the controller was restarted."""

from typing import Any

import xxhash

from services.controller.verbs import Verb


def identify(request: Any, verb: Verb, *, run: str, step: int, epoch: int, take: int, mark: str = "") -> Any:
    """Fills in `request.operation` and returns the request.

    The part is the take (how often the run was rolled back: what is played again is new work). Where a call does not
    change state, a digest of its payload follows, so that other rows or other inputs are another operation; a call that
    changes state has no digest, so that another payload is refused. `mark` sets apart what is the same otherwise.
    """
    request.ClearField("operation")
    part = f"{take}"
    if not verb.mutates:
        payload = request.SerializeToString(deterministic=True)
        part = f"{take}.{xxhash.xxh3_64_hexdigest(payload)}"
    if mark:
        part = f"{part}.{mark}"
    operation = request.operation
    operation.epoch = epoch
    operation.id.run, operation.id.step, operation.id.name, operation.id.part = run, step, verb.name, part
    return request
