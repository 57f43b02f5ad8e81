"""Mutated messages to every method of the real services: no crash, no hang, bounded memory, and well afterwards.

`pytest -m slow tests/security/test_fuzz.py` sends 10,000 to each method. A failure names the request by its number:
`mutant(method, seeds, number)` makes it again.
"""

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest
import structlog

from shared.rpc.errors import METADATA_KEY
from shared.rpc.options import CHANNEL_OPTIONS
from tests.fakes.role import TOKEN
from tests.security.fuzz import mutant
from tests.security.fuzz_world import World, world
from tests.security.methods import Method, sextet_methods
from tests.security.serving import ROLES

MIB = 1 << 20
AT_ONCE = 16
SECONDS = 20.0
METADATA = (("authorization", f"Bearer {TOKEN}"),)
# These wait for something that may never come: for as long as they are asked to.
WAITING = {f"/sextet.v1.ControllerService/{name}" for name in ("WatchRun", "CheckpointRun", "ProfileRun")}
# The same code in several roles: it gets the whole of it in one of them.
COMMON = {"sextet.v1.DataService": "reward", "sextet.v1.RoleService": "reward", "sextet.v1.WeightsService": "actor"}
# Each that is right loads a model.
QUICK = {"Configure": 40}
FEW, MANY = 200, 10_000
# UNKNOWN is an exception that nobody caught, INTERNAL one that nobody foresaw.
DEFECTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAUTHENTICATED)


async def send(channel: grpc.aio.Channel, method: Method, request: bytes) -> tuple[grpc.StatusCode, str, bool]:
    """The status, its words, and whether no answer came in time."""
    timeout = 0.2 if method.path in WAITING else SECONDS
    try:
        await method.call(channel, request, timeout=timeout, metadata=METADATA)
    except grpc.aio.AioRpcError as error:
        # A deadline that the service has set itself, and reports, comes with the name of its class.
        reported = any(key == METADATA_KEY for key, _ in error.trailing_metadata() or ())
        late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not reported
        return error.code(), error.details() or "", late and method.path not in WAITING
    return grpc.StatusCode.OK, "", False


async def fuzz(there: World, method: Method, count: int) -> tuple[Counter[str], list[str]]:
    """Sends `count` mutants, some at a time; the codes, and what must not be."""
    seeds, codes, wrong, indices = there.seeds[method.path], Counter[str](), list[str](), iter(range(count))

    async def sender(channel: grpc.aio.Channel) -> None:
        for index in indices:
            there.same_epoch()
            code, details, late = await send(channel, method, mutant(method, seeds, index))
            codes[code.name] += 1
            if code in DEFECTS or late:
                wrong.append(f"{method} #{index}: {code.name} {details[:300]}")

    async with grpc.aio.insecure_channel(there.endpoint, options=CHANNEL_OPTIONS) as channel:
        await asyncio.gather(*(sender(channel) for _ in range(AT_ONCE)))
    return codes, wrong


async def well(there: World, role: str) -> None:
    async with grpc.aio.insecure_channel(there.endpoint) as channel:
        assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5) == b"\x08\x01"
        path = (
            "/sextet.v1.ControllerService/ListServices" if role == "controller" else "/sextet.v1.RoleService/Describe"
        )
        assert await channel.unary_unary(path)(b"", timeout=5, metadata=METADATA)


def share(role: str, method: Method, count: int) -> int:
    """How many of `count` messages a method gets here."""
    quick = count == FEW
    if COMMON.get(method.service, role) != role:
        return 0 if quick else FEW
    return QUICK.get(method.name, count) if quick else count


async def storm(role: str, directory: Path, monkeypatch: pytest.MonkeyPatch, count: int, growth: int) -> Counter[str]:
    """Methods of one service; answers how often each was served in full."""
    served: Counter[str] = Counter()
    # Every refusal is logged, and here nobody reads it.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    async with world(role, directory, monkeypatch) as there:
        async with grpc.aio.insecure_channel(there.endpoint) as channel:
            for method in there.methods:
                for seed in there.seeds[method.path]:
                    await send(channel, method, seed.SerializeToString())
        there.refresh()
        before, wrong = psutil.Process().memory_info().rss, list[str]()
        for method in there.methods:
            began = time.monotonic()
            codes, found = await fuzz(there, method, share(role, method, count))
            print(f"{method} {time.monotonic() - began:.1f} s", dict(codes))
            wrong += found
            served[str(method)] = codes["OK"]
            there.refresh()
        assert wrong == [], "\n".join(wrong[:20])
        await well(there, role)
        assert psutil.Process().memory_info().rss - before < growth
    return served


def test_the_worlds_have_every_method(tmp_path: Path) -> None:
    from tests.security import fuzz_world

    service = {f"sextet.v1.{name}" for name in fuzz_world.OF_ROLE.values()}
    shared = {f"sextet.v1.{name}" for name in ("RoleService", "DataService", "WeightsService", "ControllerService")}
    external = {"sextet.v1.RewardService"}
    assert {method.service for method in sextet_methods()} == service | shared | external


def test_the_same_request_every_time() -> None:
    method = next(method for method in sextet_methods() if method.name == "CreateRun")
    seeds = [method.request(config_json='{"model": {"path": "m"}}', id="r")]
    made = [mutant(method, seeds, index) for index in range(200)]
    assert made == [mutant(method, seeds, index) for index in range(200)]
    assert len(set(made)) > 100


@pytest.mark.parametrize("role", [*ROLES, "controller"])
async def test_mutated_messages(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await storm(role, tmp_path, monkeypatch, FEW, 200 * MIB)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("role", [*ROLES, "controller"])
async def test_ten_thousand_of_each(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await storm(role, tmp_path, monkeypatch, MANY, 500 * MIB)
    # Not all is refused at the door: most methods do their work for some.
    assert sum(count > 0 for count in served.values()) > len(served) / 2
