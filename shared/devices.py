"""Which of this machine's GPUs each role's processes see, from ROLE=N,N as `sextet up --devices` takes it."""

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.config import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
NODES = Path("/dev")


@dataclass(frozen=True)
class Devices:
    """Devices of the roles' replicas; of a role that is not named, whatever this process sees.

    Attributes:
        of: for each role that is named, the devices of its replicas in turn, as CUDA_VISIBLE_DEVICES has them.
    """

    of: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)

    def environment(self, role: str, replica: str) -> dict[str, str]:
        """What a replica's processes get: the devices, and for a role of ranks one rank on each.

        Args:
            replica: `<role>-<number>`; replicas beyond the ones that are named begin again with the first's devices.
        """
        if role not in self.of:
            return {}
        number = replica.rpartition("-")[2]
        devices = self.of[role][int(number) % len(self.of[role]) if number.isdecimal() else 0]
        return {VISIBLE: ",".join(devices), "SEXTET_WORLD_SIZE": str(len(devices))}


def parse_devices(entries: Iterable[str], roles: Sequence[str], environ: Mapping[str, str]) -> Devices:
    """Reads `actor=0,1`, `rollout=2`, `rollout=3`: a role named again means its next replica.

    Args:
        roles: all there are.
        environ: numbers are places in its CUDA_VISIBLE_DEVICES where that is set, else CUDA's own.

    Raises:
        ConfigError: an unknown role, what is no number, a device that is not there or is named twice; says the nearest.
    """
    there = _there(environ)
    of: dict[str, list[list[str]]] = {}
    for entry in entries:
        role, equals, listed = entry.partition("=")
        if not equals:
            raise ConfigError(f"{entry!r} is not ROLE=N,N: write {role or roles[0]}=0")
        if role not in roles:
            near = difflib.get_close_matches(role, roles, 1)
            hint = f"did you mean {near[0]}={listed}?" if near else f"roles: {', '.join(roles)}"
            raise ConfigError(f"{entry!r}: unknown role {role!r}; {hint}")
        numbers = [_number(entry, role, text) for text in listed.split(",")]
        if len(set(numbers)) < len(numbers):
            raise ConfigError(f"{entry!r}: a device twice; did you mean {role}={','.join(dict.fromkeys(numbers))}?")
        of.setdefault(role, []).append([_place(entry, number, there) for number in numbers])
    return Devices(of)


def _number(entry: str, role: str, text: str) -> str:
    if not re.fullmatch(r"[0-9]+", text):
        found = re.findall(r"[0-9]+", text)
        raise ConfigError(f"{entry!r}: {text!r} is not the number of a device; write {role}={(found or ['0'])[-1]}")
    return str(int(text))


def _place(entry: str, number: str, there: Sequence[str] | None) -> str:
    if there is None:
        return number
    if int(number) >= len(there):
        hint = f"the last one is {len(there) - 1}" if there else f"{VISIBLE} hides all"
        raise ConfigError(f"{entry!r}: there is no device {number}; {hint}")
    return there[int(number)]


def _there(environ: Mapping[str, str]) -> list[str] | None:
    """The devices that CUDA would number 0, 1, ...; None where that is not known without CUDA."""
    if VISIBLE in environ:
        # As CUDA reads it: what follows an invalid one is not seen.
        named = [text.strip() for text in environ[VISIBLE].split(",")]
        return list(itertools.takewhile(lambda text: text and not text.startswith("-"), named))
    nodes = [node for node in NODES.glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", node.name)]
    # A device that is not there would hide the others, and a role without one computes on the CPU.
    return [str(number) for number in range(len(nodes))] or None
