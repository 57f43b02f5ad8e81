"""A run whose actor, critic and reference are two ranks each, one of which is killed on the way."""

import json
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from tests.integration.conftest import Home

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]


def rank_of(home: Home, role: str) -> psutil.Process:
    """The process that is rank 1 of a role."""
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            ours = environ.get("SEXTET_TEST_MARK") == home.mark and environ.get("RANK") == "1"
            if ours and f"services.{role}" in process.cmdline():
                return process
        except psutil.Error:
            pass
    raise AssertionError(f"no rank 1 of {role} is running")


def test_ranks_of_a_role_see_its_devices(home: Home) -> None:
    """Two ranks for the actor's two, one each for the others."""
    outer = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    up = home.sextet("up", "--devices", "actor=0,2", "--devices", "critic=0", **outer)
    assert up.returncode == 0, up.stderr
    try:
        assert rank_of(home, "actor").environ()["CUDA_VISIBLE_DEVICES"] == "4,6"
        lines = [line.split() for line in home.sextet("services").stdout.splitlines() if "-0" in line]
        gpus = {line[1]: " ".join(line).partition("(GPUs ")[2].partition(")")[0] for line in lines}
        others = dict.fromkeys(("rollout", "reward", "reference"), "4,5,6")
        assert gpus == {"controller": "", "actor": "4,6", "critic": "4", **others}
        for role in ("critic", "reference"):
            with pytest.raises(AssertionError, match="no rank 1"):
                rank_of(home, role)
    finally:
        down = home.sextet("down")
    assert down.returncode == 0, down.stderr


def test_a_run_survives_the_death_of_a_rank(home: Home) -> None:
    ranks = {"SEXTET_WORLD_SIZE": "2"}
    up = home.sextet("up", **ranks)
    assert up.returncode == 0, up.stderr
    config = home.config(total_steps=4, checkpoint={"save_interval": 1})
    run = home.start("run", home.write("run.json", config), "--json")
    assert run.stdout
    kinds, paths, killed = [], {}, False
    for line in run.stdout:
        event = json.loads(line)
        kinds.append(event.get("kind"))
        paths = event.get("paths", paths)
        if event.get("kind") == "step" and event["step"] == 2 and not killed:
            killed = True
            rank_of(home, "actor").kill()
    assert run.wait(180) == 0, run.stderr.read() if run.stderr else ""
    assert "recovery" in kinds
    before = AutoModelForCausalLM.from_pretrained(home.path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(Path(paths["model"])).state_dict()
    assert any((before[name] != after[name]).any() for name in before)
    down = home.sextet("down")
    assert down.returncode == 0, down.stderr
