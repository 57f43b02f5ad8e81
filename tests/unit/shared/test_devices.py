"""Devices of roles: what is read, what each replica gets, and what is refused in which words."""

from pathlib import Path

import pytest

from shared import devices
from shared.config import ConfigError
from shared.devices import parse_devices

ROLES = ("rollout", "actor", "critic")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without GPUs, whatever the real one has."""
    monkeypatch.setattr(devices, "NODES", tmp_path)
    return tmp_path


def places(*entries: str, replica: str, **environ: str) -> dict[str, str]:
    return parse_devices(entries, ROLES, environ).environment(replica.partition("-")[0], replica)


def test_each_replica_gets_its_roles_devices_and_a_rank_on_each() -> None:
    entries = ("actor=0,1", "critic=0", "rollout=2", "rollout=3,4")
    assert places(*entries, replica="actor-0") == {"CUDA_VISIBLE_DEVICES": "0,1", "SEXTET_WORLD_SIZE": "2"}
    assert places(*entries, replica="critic-0") == {"CUDA_VISIBLE_DEVICES": "0", "SEXTET_WORLD_SIZE": "1"}
    # Named twice: by turns.
    seen = [places(*entries, replica=f"rollout-{n}")["CUDA_VISIBLE_DEVICES"] for n in range(4)]
    assert seen == ["2", "3,4", "2", "3,4"]
    assert places(*entries, replica="rollout-of-mine")["CUDA_VISIBLE_DEVICES"] == "2"


def test_who_is_not_named_gets_nothing() -> None:
    assert places("actor=0", replica="critic-0") == {}
    assert places(replica="actor-0", CUDA_VISIBLE_DEVICES="5") == {}


def test_numbers_are_places_among_the_visible_ones() -> None:
    outer = {"CUDA_VISIBLE_DEVICES": "4, GPU-8a3f,6"}
    assert places("actor=2,1", replica="actor-0", **outer)["CUDA_VISIBLE_DEVICES"] == "6,GPU-8a3f"
    with pytest.raises(ConfigError, match="'actor=0,3': there is no device 3; the last one is 2"):
        places("actor=0,3", replica="actor-0", **outer)
    for hidden in ("", "-1", "-1,0"):
        with pytest.raises(ConfigError, match="there is no device 0; CUDA_VISIBLE_DEVICES hides all"):
            places("actor=0", replica="actor-0", CUDA_VISIBLE_DEVICES=hidden)


def test_a_device_that_the_machine_does_not_have_is_refused(machine: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (machine / name).touch()
    assert places("actor=1", replica="actor-0")["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(ConfigError, match="'rollout=2': there is no device 2; the last one is 1"):
        places("rollout=2", replica="rollout-0")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("actr=0,1", r"^'actr=0,1': unknown role 'actr'; did you mean actor=0,1\?$"),
        ("gateway=0", r"^'gateway=0': unknown role 'gateway'; roles: rollout, actor, critic$"),
        ("actor=cuda:1", r"^'actor=cuda:1': 'cuda:1' is not the number of a device; write actor=1$"),
        ("actor=0,", r"^'actor=0,': '' is not the number of a device; write actor=0$"),
        ("actor=-1", r"^'actor=-1': '-1' is not the number of a device; write actor=1$"),
        ("actor", r"^'actor' is not ROLE=N,N: write actor=0$"),
        ("=1", r"^'=1': unknown role ''; roles: rollout, actor, critic$"),
        ("actor=0,1,00", r"^'actor=0,1,00': a device twice; did you mean actor=0,1\?$"),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest_right_one(entry: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_devices([entry], ROLES, {})
