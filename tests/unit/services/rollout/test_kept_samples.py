"""Finished samples are drawn once, whatever the engine: here one that answers differently every time."""

import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.rollout.backend import EngineFacts, Sample, SampleRequest
from services.rollout.kept import KeptSamples
from services.rollout.role import RolloutRole
from services.rollout.weights import Weights
from shared.batch.block import Block
from shared.batch.spool import Spool
from shared.gen.sextet.v1 import rollout_pb2
from shared.weights.grpc import GrpcPublisher
from tests.fakes.rollout import rollout_config
from tests.fakes.tiny import write_tiny_llama

drawn: list[tuple[str, int]] = []


class FakeDice:
    """An engine without a seed; `dies_after` rows it takes the process with it (an exception that nobody catches)."""

    beats = version = 0

    def __init__(self, dies_after: int = 10**6) -> None:
        self._left = dies_after

    async def configure(self, *_: Any) -> EngineFacts:
        return EngineFacts("fake", 64, False, {})

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[Sample]:
        for row in requests:
            if not self._left:
                raise KeyboardInterrupt
            self._left -= 1
            drawn.append((row.uid, row.sample))
            ids = tuple(4 + secrets.randbelow(60) for _ in range(5))
            logprobs = tuple(-1 / (2 + secrets.randbelow(9)) for _ in ids)
            yield Sample(row.uid, row.sample, row.prompt_ids, ids, logprobs, (self.version,) * 5, "stop")

    async def health(self) -> str:
        return ""

    async def release(self) -> None:
        return None


@pytest.fixture(autouse=True)
def nothing_drawn() -> None:
    drawn.clear()
    FakeDice.version = 0


@pytest.fixture
def config(tmp_path: Path) -> Any:
    rows = [{"data_source": "t", "prompt": f"{i}", "reward_model": {"ground_truth": "1"}} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return rollout_config(write_tiny_llama(tmp_path / "model"), data=str(tmp_path / "data.jsonl"))


async def restarted(tmp_path: Path, config: Any, engine: Any = None, disk: str = "disk") -> RolloutRole:
    """A process that has just begun, on that disk."""
    weights: Any = Weights(None, GrpcPublisher("here:1"), 1)  # type: ignore[arg-type]
    kept = KeptSamples(Spool(tmp_path / disk, 10**7))
    role = RolloutRole(lambda _: engine or FakeDice(), weights, kept)
    await role.configure(config, "r", None)
    return role


def request(step: int = 1, indices: Sequence[int] = (0, 1), **more: Any) -> rollout_pb2.GenerateRequest:
    made = rollout_pb2.GenerateRequest(**more)
    made.operation.id.run, made.operation.id.step = "r", step
    for k, index in enumerate(indices):
        made.prompts.add(uid=f"{step}:{index}:{k}", index=index, samples=[0, 1])
    return made


async def generate(role: RolloutRole, asked: rollout_pb2.GenerateRequest) -> Block:
    return (await role.generate(asked)).block


async def test_a_restarted_replica_answers_with_the_same_samples(tmp_path: Path, config: Any) -> None:
    first = await generate(await restarted(tmp_path, config), request())
    again = await generate(await restarted(tmp_path, config), request())
    assert again.digest() == first.digest()
    assert len(drawn) == 4
    other = await generate(await restarted(tmp_path, config, disk="another"), request())
    assert other.digest() != first.digest(), "the engine answers differently every time"


async def test_a_replica_that_dies_amid_a_call_draws_only_what_was_not_finished(
    tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.making.PART_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        await generate(await restarted(tmp_path, config, FakeDice(dies_after=3)), request())
    finished = list(drawn)
    await generate(await restarted(tmp_path, config), request())
    assert sorted(drawn) == sorted(set(drawn))
    assert (len(finished), len(drawn)) == (3, 4)


async def test_other_shares_of_the_same_rows_find_them_too(tmp_path: Path, config: Any) -> None:
    """The pool may have changed: the rows are split otherwise."""
    first = await generate(await restarted(tmp_path, config), request())
    role = await restarted(tmp_path, config)
    share = request()
    del share.prompts[0]
    part = await generate(role, share)
    assert part.digest() == first.select(part.rows).digest()
    assert len(drawn) == 4


async def test_other_steps_greedy_rows_and_other_prompts_are_drawn(tmp_path: Path, config: Any) -> None:
    role = await restarted(tmp_path, config)
    for number, asked in enumerate((request(), request(step=2), request(greedy=True)), 1):
        await generate(role, asked)
        assert len(drawn) == 4 * number
    swapped = request(indices=(1, 0))
    for mine, theirs in zip(swapped.prompts, request().prompts, strict=True):
        mine.uid = theirs.uid
    await generate(role, swapped)
    assert len(drawn) == 16, "the row's name is the same, its prompt is not"


async def test_prompts_in_flight_have_what_earlier_steps_finished_of_them(tmp_path: Path, config: Any) -> None:
    """As after a rollback: prompts of step 2, asked for in step 4; not older than `since`, and of no later version."""

    async def asked(version: int, since: int, step: int = 4) -> Block:
        role = await restarted(tmp_path, config)
        role._weights.version = version
        wanted = request(2, since=since)
        wanted.operation.id.step = step
        for prompt in wanted.prompts:
            prompt.step = 2
        return await generate(role, wanted)

    role = await restarted(tmp_path, config)
    role._weights.version = FakeDice.version = 5
    first = await generate(role, request(2))
    assert (await asked(6, since=5)).digest() == first.digest()
    assert (await asked(5, since=0, step=3)).digest() == first.digest()
    assert len(drawn) == 4
    for version, since in ((6, 6), (4, 0)):
        assert (await asked(version, since)).digest() != first.digest()
    assert len(drawn) == 12


async def test_validation_is_not_kept(tmp_path: Path, config: Any) -> None:
    data = {"data": config.data.model_copy(update={"validation_path": config.data.path})}
    role = await restarted(tmp_path, config.model_copy(update=data))
    await generate(role, request(validation=True))
    assert not (tmp_path / "disk").exists()


async def test_released_samples_are_gone_from_the_disk(tmp_path: Path, config: Any) -> None:
    role = await restarted(tmp_path, config)
    await generate(role, request(1))
    await generate(role, request(2))
    role.kept.release("r", 1)
    await generate(role, request(2))
    assert len(drawn) == 8
    await generate(role, request(1))
    assert len(drawn) == 12
    role.kept.release("r", None)
    assert not list((tmp_path / "disk").rglob("*.block"))
