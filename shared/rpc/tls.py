"""Mutual TLS: who a process is (a certificate with `sextet://role/ROLE`), whom it trusts (one CA), and why it failed.

A peer is known by its role, not by its host: replicas come and go on hosts that no certificate could list. So every
certificate bears the name `sextet`, which is what clients check, and the CA signs for nothing but Sextet.
"""

import contextlib
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from shared.rpc.access import ROLES, callers
from shared.rpc.errors import PermissionDenied

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

NAME = "sextet"
ROLE_URI = "sextet://role/"
CA_FILE = "ca.pem"
SOON = timedelta(days=30)
TLS_OPTIONS = (("grpc.ssl_target_name_override", NAME),)
_HANDSHAKE_SECONDS = 2.0


class TlsError(ValueError):
    """Certificates that can't be used; the text names the variable and the file."""


@dataclass(frozen=True)
class Tls:
    """One process's certificate, its key, and the CA that it trusts (PEM files, read once)."""

    role: str
    cert_file: Path
    key_file: Path
    ca_file: Path
    cert: bytes
    key: bytes
    ca: bytes
    expires: datetime

    def server_credentials(self) -> grpc.ServerCredentials:
        """Callers must have a certificate of the CA."""
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For channels with TLS_OPTIONS."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    @property
    def until(self) -> str:
        """When it ends, or ended, in words."""
        word = "has expired on" if self.expires < datetime.now(UTC) else "is valid until"
        return f"{word} {self.expires:%Y-%m-%d %H:%M} UTC"

    @property
    def ends_soon(self) -> bool:
        return self.expires - datetime.now(UTC) < SOON


def load_tls(role: str, environ: Mapping[str, str] = os.environ) -> Tls | None:
    """The certificate of a role: SEXTET_TLS_CERT, _KEY and _CA, or ROLE.pem, ROLE-key.pem and ca.pem in SEXTET_TLS_DIR.

    Args:
        role: "" takes what there is in the directory: the only certificate, else the client's.

    Returns:
        None when neither is set: no TLS.

    Raises:
        TlsError: a file is missing, is not what it should be, is of another role, or has expired.
    """
    named = {kind: environ.get(f"SEXTET_TLS_{kind}", "") for kind in ("CERT", "KEY", "CA")}
    if any(named.values()):
        if missing := [f"SEXTET_TLS_{kind}" for kind, value in named.items() if not value]:
            raise TlsError(f"{' and '.join(missing)} must be set, too: a certificate, its key and the CA go together")
        return _checked(role, *(Path(named[kind]) for kind in ("CERT", "KEY", "CA")))
    if not (directory := environ.get("SEXTET_TLS_DIR", "")):
        return None
    place = Path(directory)
    name = role or _only_role(place)
    return _checked(role, place / f"{name}.pem", place / f"{name}-key.pem", place / CA_FILE)


def check_caller(method: str, context: Any) -> None:
    """Under TLS, refuses callers whose role may not call the method. Raises PermissionDenied."""
    peer = context.auth_context()
    if peer.get("transport_security_type") != [b"ssl"]:
        return
    allowed = callers(method)
    roles = [
        name.decode(errors="replace").removeprefix(ROLE_URI)
        for name in peer.get("x509_subject_alternative_name", ())
        if name.startswith(ROLE_URI.encode())
    ]
    if not set(roles) & set(allowed):
        who = f"the certificate is of role {' and '.join(roles)}" if roles else f"the certificate has no {ROLE_URI}ROLE"
        raise PermissionDenied(f"{who}; {method} is for {', '.join(allowed) or 'nobody'}", method=method)


def handshake_problem(endpoint: str, tls: Tls | None) -> str:
    """Why TLS with `host:port` fails, in words; "" when that is not the reason. Blocks for some seconds at most."""
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _HANDSHAKE_SECONDS) as plain:
            return _shaken(plain, tls)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not accepted: {error.verify_message} (the CA here is {tls and tls.ca_file})"
    except ssl.SSLError as error:
        return _told(error, tls)
    except (OSError, ValueError):
        return ""


def _shaken(plain: socket.socket, tls: Tls | None) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=tls.ca.decode())
        context.load_cert_chain(tls.cert_file, tls.key_file)
    context.set_alpn_protocols(["h2"])
    with context.wrap_socket(plain, server_hostname=NAME) as secure:
        if tls is None:
            return "it speaks TLS and this process has no certificate: set SEXTET_TLS_DIR (see `sextet certs`)"
        # Under TLS 1.3 the client is done before the server has looked at its certificate; gRPC's just hangs up.
        with contextlib.suppress(ConnectionError):
            if secure.recv(1):
                return ""
        return f"it does not accept the certificate {tls.cert_file}, which {tls.until}: another CA's, or expired there"


def _told(error: ssl.SSLError, tls: Tls | None) -> str:
    reason = (error.reason or "").lower().replace("_", " ")
    if tls is None:
        # Whatever is not TLS fails in its own way, and a plain server is what this process expects.
        return "it wants a certificate: set SEXTET_TLS_DIR (see `sextet certs`)" if "certificate" in reason else ""
    if "wrong version" in reason or "record layer" in reason or "http request" in reason:
        return "it does not speak TLS, and this process has certificates: set SEXTET_TLS_DIR for both or for neither"
    return f"it refuses the certificate {tls.cert_file}, which {tls.until}: {reason}"


def _only_role(directory: Path) -> str:
    found = [role for role in ROLES if (directory / f"{role}-key.pem").exists()]
    return found[0] if len(found) == 1 else "client"


def _checked(role: str, cert_file: Path, key_file: Path, ca_file: Path) -> Tls:
    cert, key, ca = (_read(path) for path in (cert_file, key_file, ca_file))
    certificate = _certificate(cert, cert_file)
    _certificate(ca, ca_file)
    if certificate.not_valid_after_utc < datetime.now(UTC):
        ended = f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise TlsError(f"{cert_file} has expired on {ended}: renew it with `sextet certs --renew`")
    own = role_of(certificate)
    if role and own != role:
        raise TlsError(
            f"{cert_file} is of role {own or 'none'}, and this is {role}: SEXTET_TLS_DIR has one for each role"
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert_file, key_file)
    except ssl.SSLError as error:
        raise TlsError(f"{key_file} is not the key of {cert_file}: {error.reason}") from None
    return Tls(own, cert_file, key_file, ca_file, cert, key, ca, certificate.not_valid_after_utc)


def role_of(certificate: "Certificate") -> str:
    """The role that a certificate is of; "" when it names none."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return next((uri.removeprefix(ROLE_URI) for uri in uris if uri.startswith(ROLE_URI)), "")


def _certificate(pem: bytes, path: Path) -> "Certificate":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise TlsError(f"{path} is no PEM certificate: {error}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path} can't be read ({error.strerror}): `sextet certs` makes certificates") from None
