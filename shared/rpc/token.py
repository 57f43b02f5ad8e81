"""The token that every call carries: SEXTET_TOKEN, the file SEXTET_TOKEN_FILE, or ~/.sextet/token on one machine."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

MIN_LENGTH = 16


class TokenError(ValueError):
    """No usable token; the text says what to set."""


def explicit_token(environ: Mapping[str, str]) -> str | None:
    """The token of SEXTET_TOKEN or SEXTET_TOKEN_FILE; None when neither is set."""
    if token := environ.get("SEXTET_TOKEN", "").strip():
        return _checked(token, "SEXTET_TOKEN")
    if name := environ.get("SEXTET_TOKEN_FILE"):
        try:
            return _checked(Path(name).read_text().strip(), f"SEXTET_TOKEN_FILE={name}")
        except OSError as error:
            raise TokenError(f"SEXTET_TOKEN_FILE={name} can't be read: {error.strerror}") from None
    return None


def client_token(environ: Mapping[str, str] = os.environ) -> str:
    """The token for talking to services of this user: the explicit one, else the shared file, made when missing."""
    return explicit_token(environ) or user_token()


def user_token() -> str:
    """The token in ~/.sextet/token (mode 0600), made when missing; processes that start together agree on it."""
    path = Path.home() / ".sextet" / "token"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f"token.{secrets.token_hex(6)}")
        fresh.touch(mode=0o600)
        fresh.write_text(secrets.token_urlsafe(32))
        try:
            # link, not rename: the first process wins and the others read its token.
            os.link(fresh, path)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    if path.stat().st_mode & 0o077:
        raise TokenError(f"{path} can be read by others: chmod 600 {path}")
    return _checked(path.read_text().strip(), str(path))


def _checked(token: str, source: str) -> str:
    if len(token) < MIN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise TokenError(f"{source}: a token is at least {MIN_LENGTH} printable ASCII characters without spaces")
    return token
