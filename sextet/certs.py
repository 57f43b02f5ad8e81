"""A CA of our own and a certificate for each role: who may speak to whom under mutual TLS (shared/rpc/tls.py)."""

import ipaddress
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.rpc.access import ROLES
from shared.rpc.tls import CA_FILE, NAME, ROLE_URI, TlsError

CA_KEY_FILE = "ca-key.pem"
CA_VALID, VALID = timedelta(days=3650), timedelta(days=365)
LOCAL = ("localhost", "127.0.0.1", "::1")
_CLOCKS_DIFFER = timedelta(minutes=5)


@dataclass(frozen=True)
class Made:
    """A certificate in the directory; `made` just now, or kept."""

    role: str
    file: Path
    expires: datetime
    made: bool


def make_certificates(
    directory: Path, hosts: Sequence[str] = (), *, renew: bool = False, valid: timedelta = VALID
) -> list[Made]:
    """CA, roles and client as PEM files (keys with mode 0600) in a directory; what is there is kept.

    Args:
        hosts: names and addresses by which people reach the HTTP API; this machine's own are there anyway.
        renew: replaces all but the CA.
        valid: of the roles' certificates.

    Raises:
        TlsError: the directory holds part of a set, or can't be used.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return list(_made(directory, [*LOCAL, *hosts], renew, valid))
    except OSError as error:
        raise TlsError(f"{error.filename or directory} can't be used: {error.strerror}") from None


def _made(directory: Path, hosts: Sequence[str], renew: bool, valid: timedelta) -> Iterator[Made]:
    ca_made = not (directory / CA_FILE).exists()
    if ca_made:
        if others := sorted(directory.glob("*.pem")):
            raise TlsError(f"{directory} has {others[0].name} and no {CA_FILE}: name an empty directory")
        _make_ca(directory)
    ca = _certificate(directory / CA_FILE)
    yield Made("CA", directory / CA_FILE, ca.not_valid_after_utc, ca_made)
    for role in ROLES:
        file = directory / f"{role}.pem"
        fresh = renew or not file.exists()
        if fresh:
            key = ec.generate_private_key(ec.SECP256R1())
            made = _signed(role, key, hosts, valid, ca, _ca_key(directory))
            _write(directory / f"{role}-key.pem", _pem(key), 0o600)
            _write(file, made.public_bytes(serialization.Encoding.PEM), 0o644)
        yield Made(role, file, _certificate(file).not_valid_after_utc, fresh)


def _make_ca(directory: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Sextet CA")
    builder = (
        _builder(name, name, key.public_key(), CA_VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    _write(directory / CA_KEY_FILE, _pem(key), 0o600)
    _write(directory / CA_FILE, builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), 0o644)


def _signed(
    role: str,
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    valid: timedelta,
    ca: x509.Certificate,
    ca_key: CertificateIssuerPrivateKeyTypes,
) -> x509.Certificate:
    # A person's certificate can't serve: whoever gets hold of it can't pose as a service.
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([] if role == "client" else [ExtendedKeyUsageOID.SERVER_AUTH])]
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(f"{ROLE_URI}{role}"), x509.DNSName(NAME)]
    builder = (
        _builder(_name(role), ca.subject, key.public_key(), valid)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names + [_host(host) for host in hosts]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key()),  # type: ignore[arg-type]
            critical=False,
        )
    )
    return builder.sign(ca_key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # A certificate that has already ended is for tests: it must not end before it begins.
        .not_valid_before(min(now, now + valid) - _CLOCKS_DIFFER)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=signs_certificates, crl_sign=signs_certificates, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise TlsError(f"--hosts {host!r} is neither a name nor an address (ASCII, no port)") from None


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _ca_key(directory: Path) -> CertificateIssuerPrivateKeyTypes:
    file = directory / CA_KEY_FILE
    if not file.exists():
        raise TlsError(f"{file} is not there: only where the CA's key is can certificates be made")
    try:
        return serialization.load_pem_private_key(file.read_bytes(), None)  # type: ignore[return-value]
    except (ValueError, TypeError) as error:
        raise TlsError(f"{file} is no private key: {error}") from None


def _certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError as error:
        raise TlsError(f"{file} is no PEM certificate: {error}") from None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Beside, then renamed: a key never has another mode, and a reader never sees half of it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
        file.write(content)
    fresh.replace(path)
