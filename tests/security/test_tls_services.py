"""The six services under mutual TLS: `sextet certs`, `up`, `run`, and what those without a certificate are told."""

import json
import shutil
import ssl
import urllib.request
from pathlib import Path

import pytest

from sextet.endpoint import read_state
from tests.integration.conftest import make_home

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_under_mutual_tls(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    made = home.sextet("certs")
    assert made.returncode == 0, made.stderr
    tls = {"SEXTET_TLS_DIR": "certs"}
    up = home.sextet("up", **tls)
    try:
        assert up.returncode == 0, up.stderr
        assert "HTTP https://127.0.0.1:" in up.stdout
        ended = home.sextet("run", home.write("ppo.json", home.config()), "--json", **tls)
        assert ended.returncode == 0, ended.stderr
        run = json.loads(ended.stdout.splitlines()[-1])["run"]
        assert (run["state"], run["step"]) == ("done", 3)
        state = read_state(home.path / ".sextet")
        assert state is not None

        plain = home.sextet("runs")
        assert plain.returncode == 3
        assert "speaks TLS and this process has no certificate" in plain.stderr
        assert home.sextet("certs", "--dir", "others").returncode == 0
        stranger = home.sextet("runs", SEXTET_TLS_DIR="others")
        assert stranger.returncode == 3
        assert "certificate is not accepted" in stranger.stderr
        (home.path / "posing").mkdir()
        for name in ("ca.pem", "reward.pem", "reward-key.pem"):
            shutil.copy(home.path / "certs" / name, home.path / "posing" / name.replace("reward", "client"))
        posing = home.sextet("runs", SEXTET_TLS_DIR="posing")
        assert posing.returncode == 2
        assert "is of role reward, and this is client" in posing.stderr
        context = ssl.create_default_context(cafile=str(home.path / "certs" / "ca.pem"))
        assert urllib.request.urlopen(f"https://{state.http}/docs", timeout=10, context=context).status == 200
    finally:
        home.sextet("down", **tls)
    assert home.leftovers() == []
