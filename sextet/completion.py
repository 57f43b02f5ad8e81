"""Tab completion: run ids, roles, and configuration keys. Never fails and never waits long."""

import contextlib
from collections.abc import Iterator

from sextet.client import Client
from sextet.local import ROLES
from shared.config import RunConfig, Section
from shared.rpc.errors import SextetError
from shared.rpc.token import TokenError


def complete_run(incomplete: str) -> list[str]:
    """Ids of runs."""
    with contextlib.suppress(SextetError, TokenError), Client() as client:
        return [run.id for run in client.list_runs() if run.id.startswith(incomplete)]
    return []


def complete_role(incomplete: str) -> list[str]:
    """Roles."""
    return [role for role in ROLES if role.startswith(incomplete)]


def complete_override(incomplete: str) -> list[str]:
    """`actor.optimizer.lr=` and the like."""
    return [f"{key}=" for key in keys(RunConfig) if key.startswith(incomplete)]


def keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """All dotted keys."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name
