"""A wire that always fails, in real services: paid for once, and `sextet services` says why weights go by gRPC."""

import json

import pytest

from tests.integration.conftest import Home

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_a_run_pays_once_for_a_wire_that_always_fails(home: Home) -> None:
    up = home.sextet("up", SEXTET_FAILPOINTS="weights.bucket.0@rollout=error")
    assert up.returncode == 0, up.stderr
    try:
        config = home.write("wire.json", home.config(weights={"channel": "gloo"}))
        ended = home.sextet("run", config, "--json")
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout.splitlines()[-1])["run"]["state"] == "done"
        listed = json.loads(home.sextet("services", "--json").stdout)
        [rollout] = [each for each in listed if each["role"] == "rollout"]
        assert "the wire failed (1 in a row; tried again in" in rollout["facts"]["weights"]
        assert "FailpointError" in rollout["facts"]["weights"]
        log = next((home.path / ".sextet/logs").glob("controller*.log")).read_text()
        assert log.count("weights not taken together, but alone") == 1, "three steps, one attempt"
    finally:
        home.sextet("down")
