"""Settings from flags and environment, and the token."""

import multiprocessing
import stat
from pathlib import Path

import pytest

from shared.rpc.settings import ServiceSettings, SettingsError, is_loopback, split_address
from shared.rpc.token import TokenError, client_token, user_token

TOKEN = "0123456789abcdef-token"


class ActorSettings(ServiceSettings):
    """A role's settings."""

    role: str = "actor"
    device: str = "auto"
    """Where it computes."""


def load(*argv: str, **environ: str) -> ActorSettings:
    return ActorSettings.load(argv, {"SEXTET_TOKEN": TOKEN, **environ})


def test_defaults() -> None:
    settings = load()
    assert (settings.role, settings.bind, settings.device) == ("actor", "127.0.0.1:0", "auto")
    assert settings.replica.startswith("actor-")
    assert len(settings.replica) == len("actor-") + 6
    assert settings.replica != load().replica
    assert settings.loopback


def test_flags_win_over_the_environment_and_both_over_defaults() -> None:
    settings = load("--device", "cpu", "--redis=redis://h:1/2", SEXTET_DEVICE="cuda", SEXTET_LEASE_TTL="2.5")
    assert (settings.device, settings.redis_url, settings.lease_ttl) == ("cpu", "redis://h:1/2", 2.5)
    assert load("--redis-url", "redis://h:1/3").redis_url == "redis://h:1/3"
    assert load(SEXTET_REDIS_URL="redis://h:1/4").redis_url == "redis://h:1/4"


@pytest.mark.parametrize(("argv", "expected"), [([], False), (["--reflection"], True), (["--reflection=false"], False)])
def test_switches(argv: list[str], expected: bool) -> None:
    assert load(*argv).reflection is expected


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--bnd", "x"], {}, r"unknown flag '--bnd'; did you mean --bind\?"),
        (["--zzzzzz"], {}, "known flags: .*--bind"),
        (["--token", TOKEN], {}, "other users would see it; set SEXTET_TOKEN"),
        (["--role", "critic"], {}, "unknown flag '--role'"),
        (["--bind", "8000"], {}, "bind='8000' is not host:port"),
        (["--bind", "127.0.0.1:99999"], {}, "not host:port"),
        (["--lease-ttl", "soon"], {}, r"--lease-ttl \(SEXTET_LEASE_TTL\) = 'soon'"),
        ([], {"SEXTET_METRICS_PORT": "-2"}, r"--metrics-port \(SEXTET_METRICS_PORT\) = '-2'"),
        (["--log-level", "loud"], {}, r"--log-level .*'loud'"),
        ([], {"SEXTET_TOKEN": "short"}, "SEXTET_TOKEN: a token is at least 16"),
        ([], {"SEXTET_TOKEN": "with spaces in the token"}, "SEXTET_TOKEN"),
        (
            [],
            {"SEXTET_TOKEN": "", "SEXTET_TOKEN_FILE": "/nowhere/token"},
            "SEXTET_TOKEN_FILE=/nowhere/token can't be read",
        ),
    ],
)
def test_what_can_not_be_used_is_named(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(*argv, **environ)


def test_off_loopback_a_token_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--bind 0\.0\.0\.0:1 is reachable from other machines: set SEXTET_TOKEN"):
        ActorSettings.load(["--bind", "0.0.0.0:1"], {})
    file = tmp_path / "secret"
    file.write_text(TOKEN + "\n")
    settings = ActorSettings.load(["--bind", "0.0.0.0:1"], {"SEXTET_TOKEN_FILE": str(file)})
    assert settings.token.get_secret_value() == TOKEN
    assert TOKEN not in repr(settings)


def test_on_loopback_the_users_token_is_made_and_kept(tmp_path: Path) -> None:
    settings = ActorSettings.load([], {})
    path = tmp_path / ".sextet" / "token"
    assert settings.token.get_secret_value() == path.read_text() == client_token({})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(TokenError, match="chmod 600"):
        user_token()


def test_processes_that_start_together_agree_on_the_token(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        tokens = {result.get(60) for result in [pool.apply_async(user_token) for _ in range(16)]}
    assert len(tokens) == 1
    assert [path.name for path in (tmp_path / ".sextet").iterdir()] == ["token"]


def test_help_explains_every_flag(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for text in ("--redis", "--device", "Where it computes", "SEXTET_DRAIN_TIMEOUT", "python -m services.actor"):
        assert text in shown


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "actor", "localhost.evil.org"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_endpoint_for_others() -> None:
    assert load().endpoint(5) == "127.0.0.1:5"
    assert load("--advertise", "actor-0.sextet").endpoint(5) == "actor-0.sextet:5"
    assert not load("--bind", "0.0.0.0:0").endpoint(5).startswith("0.0.0.0")
    assert split_address("[::1]:70") == ("[::1]", 70)
