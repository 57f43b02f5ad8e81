"""The real roles with an engine that draws anew every time: whoever is restarted, no finished sample is drawn again.

All roles are in this process, so that what the engine draws can be counted; a role is stopped as SIGTERM would.
"""

import importlib
import json
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from services.rollout.backend import EngineFacts, Sample, SampleRequest
from services.rollout.backends import make_backend
from shared.state import open_store
from tests.chaos.processes import REWARD, run_config
from tests.fakes.role import fake_role
from tests.unit.services.controller.conftest import Controller

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, RESTART_AT = 5, 3
drawn: Counter[tuple[str, int]] = Counter()


class FakeReseeded:
    """The hf engine, with another seed for every row and every time."""

    def __init__(self, name: str) -> None:
        self._real: Any = make_backend(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def configure(self, *arguments: Any) -> EngineFacts:
        return replace(await self._real.configure(*arguments), batch_invariant=False)

    async def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[Sample]:
        drawn.update((row.uid, row.sample) for row in requests)
        async for sample in self._real.generate([replace(row, seed=secrets.randbits(62)) for row in requests]):
            yield sample


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded one at a time (transformers keeps its loading context per process), by the engine above."""
    loading = threading.Lock()
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        real: Any = kind.from_pretrained

        def locked(*arguments: Any, real: Any = real, **options: Any) -> Any:
            with loading:
                return real(*arguments, **options)

        monkeypatch.setattr(kind, "from_pretrained", locked)
    monkeypatch.setattr("services.rollout.__main__.make_backend", FakeReseeded)


async def started(stack: AsyncExitStack, role: str, url: str, directory: Path) -> Any:
    build = importlib.import_module(f"services.{role}.__main__").build
    settings = getattr(importlib.import_module(f"services.{role}.settings"), f"{role.capitalize()}Settings")
    place = {"redis_url": url, "replica": f"{role}-0", "lease_ttl": 1.0, "data_dir": directory / role}
    return await stack.enter_async_context(fake_role(build, settings, **place))


def slow_run(directory: Path, **changes: Any) -> dict[str, Any]:
    """A step takes so long that what is restarted after one is restarted in the next."""
    tree = run_config(directory, total_steps=STEPS, **changes)
    (directory / "reward.py").write_text(REWARD.replace("    return", "    import time; time.sleep(0.25)\n    return"))
    return tree


@asynccontextmanager
async def playing(name: str, directory: Path) -> AsyncIterator[tuple[Controller, Callable[[str], Awaitable[Any]]]]:
    """A controller with all roles, and what starts one of them again."""
    drawn.clear()
    url = f"memory://drawn-once-{name}"
    async with AsyncExitStack() as stack:
        roles: dict[str, Any] = {}

        async def start(role: str) -> None:
            if role in roles:
                roles[role].stop.set()
                await roles[role].served
            roles[role] = await started(stack, role, url, directory)

        for role in ("actor", "critic", "rollout", "reward", "reference"):
            await start(role)
        yield await stack.enter_async_context(Controller(open_store(url), directory / "runs")), start


async def played_with_restarts(tree: dict[str, Any], name: str, directory: Path, restarts: Sequence[str]) -> list[str]:
    """Plays the run, roles restarted amid it, to its end; what its recoveries told."""
    async with playing(name, directory) as (controller, start_again):
        await controller.runs.create(json.dumps(tree), "r")
        await stepped(controller)
        for role in restarts:
            await start_again(role)
        record = await controller.over("r", 240)
        assert (record.state, record.reason, record.step) == ("done", "", STEPS)
        return [message for kind, _, message in await controller.events("r") if kind == "recovery"]


async def stepped(controller: Controller) -> None:
    """Returns when the run has done the step after which it is disturbed."""
    async for event in controller.runs.watch("r", ""):
        if event.kind == "step" and event.step == RESTART_AT:
            break


@pytest.mark.parametrize("restarts", [["actor"], ["rollout"], ["rollout", "actor"]])
async def test_after_a_restart_no_sample_is_drawn_again(tmp_path: Path, restarts: list[str]) -> None:
    # Without a checkpoint on the way: an actor that is lost costs the run from its start.
    tree = slow_run(tmp_path / "inputs", checkpoint__save_interval=100)
    told = await played_with_restarts(tree, "-".join(restarts), tmp_path, restarts)
    assert any("goes on from step 0" in message for message in told) == ("actor" in restarts)
    assert len(drawn) == STEPS * 4
    assert set(drawn.values()) == {1}


async def test_back_at_a_checkpoint_prompts_in_flight_have_their_samples(tmp_path: Path) -> None:
    """Sampled ahead by the policy before the checkpoint's, finished, and lost with the actor that held them."""
    more = {"flow": "async_ppo", "algorithm__staleness": 1, "checkpoint__save_interval": 2}
    told = await played_with_restarts(slow_run(tmp_path / "inputs", **more), "ahead", tmp_path, ["actor"])
    assert any("goes on from step 2" in message for message in told), told
    assert len(drawn) == STEPS * 4
    assert set(drawn.values()) == {1}


async def test_over_a_pause_in_which_others_play_samples_in_flight_are_kept(tmp_path: Path) -> None:
    more = {"flow": "async_ppo", "algorithm__staleness": 1}
    ahead = slow_run(tmp_path / "inputs", **more)
    async with playing("pause", tmp_path) as (controller, _):
        await controller.runs.create(json.dumps(ahead), "r")
        await stepped(controller)
        await controller.runs.pause("r")
        record = await controller.runs.get("r")
        await controller.until(lambda: record.state == "paused")
        once, other = dict(drawn), run_config(tmp_path / "other", total_steps=1)
        await controller.runs.create(json.dumps(other), "between")
        assert (await controller.over("between", 60)).state == "done"
        drawn.clear()
        drawn.update(once)
        await controller.runs.resume("r")
        record = await controller.over("r", 240)
        assert (record.state, record.reason, record.step) == ("done", "", STEPS)
    assert len(drawn) == STEPS * 4
    assert set(drawn.values()) == {1}
