"""Settings of a service: fields with defaults, set by SEXTET_* variables and overridden by flags."""

import argparse
import difflib
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from shared.rpc.tls import Tls, TlsError, load_tls
from shared.rpc.token import TokenError, explicit_token, user_token

# Not settable as flags: the role is the program's; a token on a command line is seen by every user of the machine.
_NOT_FLAGS = ("role", "token")
_SHORT_FLAGS = {"redis_url": "--redis"}


class SettingsError(ValueError):
    """Settings that can't be used; the text names the flag or variable, the value and what to write instead."""


class ServiceSettings(BaseModel):
    """What every service needs. A role's settings are a subclass with its own `role` default and further fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    role: str = "service"
    """The role's name."""
    replica: str = ""
    """Id of this replica, kept over restarts; made up when empty."""
    bind: str = "127.0.0.1:0"
    """host:port to listen on; port 0 picks a free one."""
    advertise: str | None = None
    """Host name or address by which others reach this service; default: the bind host, or the host name for 0.0.0.0."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """Global state: redis://[:password@]host:port/db. Better in SEXTET_REDIS_URL when it holds a password."""
    token: SecretStr
    tls_dir: str = ""
    """Directory of certificates, one per role, for mutual TLS between all services (see `sextet certs`)."""
    tls_cert: str = ""
    """This service's own certificate, instead of a directory; with tls_key and tls_ca."""
    tls_key: str = ""
    """Its key."""
    tls_ca: str = ""
    """The CA that signed everybody's certificate."""
    metrics_port: Annotated[int, Field(ge=-1, le=65535)] = 0
    """Port of Prometheus metrics; 0 picks a free one (see facts "metrics"), -1 is off."""
    reflection: bool = False
    """gRPC reflection, for development."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""
    lease_ttl: Annotated[float, Field(gt=0)] = 6.0
    """Seconds after which a silent replica counts as dead."""
    drain_timeout: Annotated[float, Field(ge=0)] = 20.0
    """Seconds that running operations may take after SIGTERM."""
    data_dir: Path = Path(".sextet")
    """Directory for what this service keeps on disk."""
    max_held_bytes: Annotated[int, Field(gt=0)] = 2 * 1024**3
    """Bytes of batches held before new ones are refused."""

    @model_validator(mode="before")
    @classmethod
    def _made_up(cls, values: dict[str, Any]) -> dict[str, Any]:
        role = values.get("role", cls.model_fields["role"].default)
        return {**values, "replica": values.get("replica") or f"{role}-{secrets.token_hex(3)}"}

    @model_validator(mode="after")
    def _address(self) -> Self:
        host, port = split_address(self.bind)
        if not host or not 0 <= port <= 65535:
            raise ValueError(f"bind={self.bind!r} is not host:port")
        return self

    @classmethod
    def load(cls, argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> Self:
        """Reads flags and environment; prints help and exits for --help.

        Raises:
            SettingsError: an unknown flag (with the nearest one), a value that doesn't fit, a missing token.
        """
        values = {
            name: environ[_variable(name)]
            for name in cls.model_fields
            if name not in _NOT_FLAGS and environ.get(_variable(name))
        }
        values |= _read_flags(cls, sys.argv[1:] if argv is None else argv)
        bind = str(values.get("bind", cls.model_fields["bind"].default))
        try:
            settings = cls.model_validate({**values, "token": _token(bind, environ)})
            _ = settings.tls  # read now: what is wrong with it is a setting that is wrong
            return settings
        except ValidationError as error:
            raise SettingsError("\n".join(_explain(item) for item in error.errors())) from None
        except (TokenError, TlsError) as error:
            raise SettingsError(str(error)) from None

    @property
    def loopback(self) -> bool:
        """The service is reachable from this machine only."""
        return is_loopback(split_address(self.bind)[0])

    @cached_property
    def tls(self) -> Tls | None:
        """This service's certificate; None without TLS. Raises TlsError."""
        names = ("tls_dir", "tls_cert", "tls_key", "tls_ca")
        return load_tls(self.role, {_variable(name): getattr(self, name) for name in names})

    def endpoint(self, port: int) -> str:
        """host:port for others, once the port is known."""
        host = self.advertise or split_address(self.bind)[0]
        return f"{socket.gethostname() if host in ('0.0.0.0', '[::]') else host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """`host:port` as its parts; port -1 when it is not a number."""
    host, _, port = address.rpartition(":")
    return host, int(port) if port.isdecimal() else -1


def is_loopback(host: str) -> bool:
    """Only this machine reaches that host; a name other than localhost counts as reachable from elsewhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _token(bind: str, environ: Mapping[str, str]) -> SecretStr:
    if token := explicit_token(environ):
        return SecretStr(token)
    if not is_loopback(split_address(bind)[0]):
        raise TokenError(
            f"--bind {bind} is reachable from other machines: set SEXTET_TOKEN or SEXTET_TOKEN_FILE, "
            "or bind to 127.0.0.1"
        )
    return SecretStr(user_token())


def _read_flags(model: type[BaseModel], argv: Sequence[str]) -> dict[str, Any]:
    role = model.model_fields["role"].default
    parser = argparse.ArgumentParser(f"python -m services.{role}", description=model.__doc__, allow_abbrev=False)
    names: list[str] = []
    for name, field in model.model_fields.items():
        if name in _NOT_FLAGS:
            continue
        flags = [_flag(name), *([f"--{name.replace('_', '-')}"] if name in _SHORT_FLAGS else [])]
        names += flags
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {"metavar": "VALUE"}
        text = f"{field.description or ''} [{_variable(name)}; default: {field.default!r}]".replace("%", "%%")
        parser.add_argument(*flags, dest=name, default=argparse.SUPPRESS, help=text, **switch)
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise SettingsError(_unknown_flag(unknown[0], names))
    return vars(known)


def _unknown_flag(given: str, names: Sequence[str]) -> str:
    flag = given.partition("=")[0]
    if flag == "--token":
        return "unknown flag --token: other users would see it; set SEXTET_TOKEN or SEXTET_TOKEN_FILE"
    near = difflib.get_close_matches(flag, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"known flags: {', '.join(sorted(names))}"
    return f"unknown flag {given!r}; {hint}"


def _explain(error: Any) -> str:
    name = str(error["loc"][0]) if error["loc"] else ""
    text = error["msg"].removeprefix("Value error, ")
    return f"{_flag(name)} ({_variable(name)}) = {error['input']!r}: {text}" if name else text


def _flag(name: str) -> str:
    return _SHORT_FLAGS.get(name, f"--{name.replace('_', '-')}")


def _variable(name: str) -> str:
    return f"SEXTET_{name.upper()}"
