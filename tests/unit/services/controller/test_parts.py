"""The small parts: handles, prompt order, splitting, metrics, operation ids, flows by name, the process scaler."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.controller import verbs
from services.controller.calls import CallFailed, Result, Scope
from services.controller.flows import load_flow
from services.controller.flows.dapo import informative
from services.controller.metrics import combine
from services.controller.operation import identify
from services.controller.prompts import DatasetOrder, Prompt, PromptSource, split_prompts, spread_prompts
from services.controller.scalers.process import ProcessScaler
from services.controller.summary import MEASURES, measure
from shared.config import ConfigError
from shared.devices import parse_devices
from shared.gen.sextet.v1 import batch_pb2, common_pb2, rollout_pb2


async def test_independent_calls_run_at_the_same_time() -> None:
    running, most = 0, 0

    async def work(_: list[Result]) -> Result:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return Result("x")

    async with Scope() as scope:
        first = scope.start("a", work, ())
        handles = [scope.start("b", work, [first]) for _ in range(4)]
        scope.start("c", work, handles)
    assert most == 4
    assert [result.call for result in scope.results] == ["x"] * 6


async def test_the_first_failure_cancels_the_rest_and_is_the_cause() -> None:
    cancelled = asyncio.Event()

    async def slow(_: list[Result]) -> Result:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    async def fail(_: list[Result]) -> Result:
        raise ValueError("no")

    with pytest.raises(CallFailed, match=r"^b: no$") as raised:  # noqa: PT012
        async with Scope() as scope:
            scope.start("a", slow, ())
            failing = scope.start("b", fail, ())
            scope.start("c", slow, [failing])
    assert isinstance(raised.value.cause, ValueError)
    assert cancelled.is_set()


async def test_what_comes_after_a_skipped_call_is_skipped() -> None:
    done = []

    async def skip(_: list[Result]) -> Result:
        return Result("skip", skipped=True)

    async def work(_: list[Result]) -> Result:
        done.append(1)
        return Result("work")

    async with Scope() as scope:
        gate = scope.start("gate", skip, ())
        late = scope.start("work", work, (), [gate])
    assert (await late).skipped
    assert not done


def test_the_controller_reaches_neither_torch_nor_numpy() -> None:
    code = "import sys, services.controller.__main__; print(sorted({'torch', 'numpy', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "[]\n"


@given(rows=st.integers(1, 40), seed=st.integers(0, 99), epochs=st.integers(1, 3), shuffle=st.booleans())
def test_every_epoch_has_every_row_once(rows: int, seed: int, epochs: int, shuffle: bool) -> None:
    order = DatasetOrder(rows, seed, shuffle)
    for epoch in range(epochs):
        assert sorted(order.at(epoch * rows + offset) for offset in range(rows)) == list(range(rows))
    # A run that is resumed in the middle sees the same order.
    assert DatasetOrder(rows, seed, shuffle).at(rows // 2) == order.at(rows // 2)


def test_prompts_of_a_step_have_uids_of_their_own() -> None:
    source = PromptSource(DatasetOrder(3, 0, False), 2)
    prompts = [*source.take(7, 4), *source.take(7, 2, already=4)]
    assert [prompt.uid for prompt in prompts] == ["7:0:0", "7:1:1", "7:2:2", "7:0:3", "7:1:4", "7:2:5"]
    assert source.position == 6


prompt_lists = st.lists(st.integers(1, 4), min_size=1, max_size=8).map(
    lambda counts: [Prompt(f"1:{i}:{i}", i, tuple(range(count))) for i, count in enumerate(counts)]
)


@given(prompts=prompt_lists, parts=st.integers(1, 6))
def test_splitting_prompts_loses_and_doubles_nothing(prompts: list[Prompt], parts: int) -> None:
    shares = split_prompts(prompts, parts)
    rows = [(prompt.uid, sample) for share in shares for prompt in share for sample in prompt.samples]
    assert sorted(rows) == sorted((prompt.uid, sample) for prompt in prompts for sample in prompt.samples)
    assert len(shares) <= parts
    assert all(shares)
    for share in shares:
        assert len({prompt.uid for prompt in share}) == len(share)
    if len(prompts) >= parts:
        assert {prompt.samples for share in shares for prompt in share} == {prompt.samples for prompt in prompts}
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(prompts=prompt_lists, parts=st.integers(1, 4), slow=st.sampled_from([1.0, 0.3]))
def test_spreading_prompts_loses_and_doubles_nothing(prompts: list[Prompt], parts: int, slow: float) -> None:
    speeds = {f"r{k}": slow if k else 1.0 for k in range(parts)}
    shares = spread_prompts(prompts, speeds, {})
    rows = [(prompt.uid, sample) for share in shares.values() for prompt in share for sample in prompt.samples]
    assert sorted(rows) == sorted((prompt.uid, sample) for prompt in prompts for sample in prompt.samples)
    for share in shares.values():
        assert len({prompt.uid for prompt in share}) == len(share)
    assert spread_prompts(prompts, speeds, {}) == shares


def test_a_prompt_goes_where_it_went_before() -> None:
    speeds = {"r0": 1.0, "r1": 1.0, "r2": 1.0}

    def places(step: int) -> dict[int, str]:
        prompts = [
            Prompt(f"{step}:{index}:0", index, (0, 1)) for index in (range(12) if step % 2 else range(11, -1, -1))
        ]
        return {prompt.index: name for name, share in spread_prompts(prompts, speeds, {}).items() for prompt in share}

    first, second = places(1), places(2)
    assert sum(first[index] == second[index] for index in range(12)) >= 8
    assert [list(first.values()).count(name) for name in speeds] == [4, 4, 4]


def test_metrics_of_parts_become_those_of_the_whole() -> None:
    parts = [
        SimpleNamespace(block=SimpleNamespace(rows=[0] * rows), metrics=metrics)
        for rows, metrics in [
            (3, {"response_tokens": 30, "mean": 1.0, "max": 2.0, "min": 0.0, "seconds": 1.5, "tokens_per_second": 3.0}),
            (1, {"response_tokens": 5, "mean": 0.0, "max": 1.0, "min": -1.0, "seconds": 2.5, "tokens_per_second": 4.0}),
        ]
    ]
    assert combine(parts) == {
        "response_tokens": 35, "mean": 0.75, "max": 2.0, "min": -1.0, "seconds": 2.5, "tokens_per_second": 7.0
    }  # fmt: skip


def test_mismatch_staleness_and_overlap_are_exported() -> None:
    numbers = {
        "actor.advantages/rollout_kl": 0.25,
        "actor.advantages/rollout_ess": 0.75,
        "actor.advantages/rollout_logprob_abs_difference_max": 0.5,
        "actor.advantages/kl": 9.0,
        "rollout.ready/staleness_max": 2.0,
        "overlap/share": 0.5,
        "critic.update/rank_seconds_max": 3.0,
        "critic.update/rank_seconds_min": 1.0,
    }
    measure({"seconds": 1.0, "tokens_per_second": 2.0, **numbers}, [])

    def exported(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"sextet_controller_{name}", labels)

    measured = {name: exported("rollout_mismatch", measure=name) for name in MEASURES}
    assert {name: value for name, value in measured.items() if value is not None} == {
        "kl": 0.25, "ess": 0.75, "logprob_abs_difference_max": 0.5
    }  # fmt: skip
    assert (exported("staleness_max"), exported("overlap_ratio")) == (2, 0.5)
    ranks = [exported("rank_seconds", call="critic.update", rank=rank) for rank in ("slowest", "fastest")]
    assert ranks == [3, 1]


def test_the_same_work_has_the_same_id_and_other_work_another() -> None:
    def part(verb: verbs.Verb, uid: str, take: int = 0, mark: str = "", epoch: int = 1) -> str:
        request = rollout_pb2.GenerateRequest(prompts=[Prompt(uid, 0, (0,)).message()])
        return identify(request, verb, run="r", step=1, epoch=epoch, take=take, mark=mark).operation.id.part

    assert part(verbs.GENERATE, "a") == part(verbs.GENERATE, "a", epoch=9)
    parts = [part(verbs.GENERATE, "a"), part(verbs.GENERATE, "b"), part(verbs.GENERATE, "a", take=1),
             part(verbs.GENERATE, "a", mark="again1")]  # fmt: skip
    assert len(set(parts)) == 4
    assert part(verbs.ACTOR_UPDATE, "a") == part(verbs.ACTOR_UPDATE, "b")


def test_informative_prompts_are_those_with_differing_valid_scores() -> None:
    keys = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1), ("d", 0), ("d", 1)]
    rows = [common_pb2.RowKey(uid=uid, sample=sample) for uid, sample in keys]
    ref = batch_pb2.BatchRef(blocks=[batch_pb2.BlockRef(rows=rows, tokens=[1] * 8)])
    nan = float("nan")
    assert informative(Result("s", ref, scores=(0, 1, 1, 1, nan, 1, 0.5, 0.25))) == ["a", "d"]


def test_informative_prompts_have_differing_samples_and_not_just_differing_rows_of_one() -> None:
    keys = [("a", 0), ("a|1", 0), ("a", 1), ("b", 0), ("b|1", 0), ("b", 1), ("c", 0), ("c|1", 0)]
    rows = [common_pb2.RowKey(uid=uid, sample=sample) for uid, sample in keys]
    ref = batch_pb2.BatchRef(blocks=[batch_pb2.BlockRef(rows=rows, tokens=[1] * 8)])
    assert informative(Result("s", ref, scores=(0, 1, 0.5, 0, 1, 0.25, 0, 1))) == ["b"]


FLOW_FILE = """
from services.controller.flows.base import DataFlow
class MyFlow(DataFlow):
    pass
class Other: pass
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grop", r"unknown flow 'grop'; did you mean 'grpo'\?"),
        ("nothing.there:Flow", "cannot be imported: ModuleNotFoundError"),
        ("{file}:MyFlw", r"'MyFlw' is not there; did you mean 'MyFlow'\?"),
        ("{file}:Other", "'Other' is not a subclass of DataFlow; .*MyFlow"),
        ("{file}x.py:MyFlow", "does not exist"),
        ("shared.config:RunConfig", "'RunConfig' is not a subclass of DataFlow; subclasses of DataFlow there: none"),
    ],
)
def test_a_flow_that_is_not_there_is_named_with_the_nearest(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "flow.py").write_text(FLOW_FILE)
    with pytest.raises(ConfigError, match=message):
        load_flow(name.format(file=tmp_path / "flow.py"))


def test_a_flow_in_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW_FILE)
    assert load_flow(f"{tmp_path / 'flow.py'}:MyFlow").__name__ == "MyFlow"
    assert load_flow("services.controller.flows.ppo:PPO") is load_flow("ppo")


CHILD = """
import signal, sys, time
def stop(*_):
    if "stubborn" in sys.argv: return
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print(sys.argv, flush=True)
while True: time.sleep(0.05)
"""


async def until_logged(path: Path) -> str:
    async with asyncio.timeout(60):
        while not (path.exists() and (text := path.read_text())):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)
    return text


async def test_the_process_scaler_starts_drains_and_kills(tmp_path: Path) -> None:
    def command(role: str) -> list[str]:
        return [sys.executable, "-c", CHILD, role]

    scaler = ProcessScaler(tmp_path, command=command, drain=60)
    try:
        assert await scaler.scale("rollout", 2) == (0, 2)
        assert [each.replica for each in scaler.list()] == ["rollout-0", "rollout-1"]
        assert "['-c', 'rollout', '--replica', 'rollout-1']" in await until_logged(tmp_path / "rollout-1.log")
        with pytest.raises(ValueError, match="is kept here already"):
            await scaler.start("rollout", "rollout-0")
        youngest = scaler.list()[1].process
        assert await scaler.scale("rollout", 1) == (2, 1)
        assert youngest.returncode == 7
        stubborn = await scaler.start("stubborn")
        await until_logged(tmp_path / "stubborn-0.log")
        scaler._drain = 0.3
        assert await scaler.stop(stubborn.replica) == -9
    finally:
        await scaler.close()
    assert scaler.list() == []


SEEN = """
import os, time
print(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("SEXTET_WORLD_SIZE"), flush=True)
time.sleep(600)
"""


async def test_replicas_see_the_devices_of_their_role_also_new_and_restarted_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("SEXTET_WORLD_SIZE", raising=False)
    devices = parse_devices(["actor=0,1", "rollout=2", "rollout=3"], ("actor", "rollout"), os.environ)
    scaler = ProcessScaler(tmp_path, command=lambda role: [sys.executable, "-c", SEEN], devices=devices)
    try:
        for role, replicas in {"actor": 1, "critic": 1, "rollout": 1}.items():
            await scaler.scale(role, replicas)
        assert await until_logged(tmp_path / "actor-0.log") == "4,5 2\n"
        assert await until_logged(tmp_path / "critic-0.log") == "4,5,6,7 None\n"
        assert await until_logged(tmp_path / "rollout-0.log") == "6 1\n"
        await scaler.scale("rollout", 3)
        assert await until_logged(tmp_path / "rollout-1.log") == "7 1\n"
        assert await until_logged(tmp_path / "rollout-2.log") == "6 1\n"
        (tmp_path / "rollout-1.log").unlink()
        scaler.list("rollout")[1].process.kill()
        assert await until_logged(tmp_path / "rollout-1.log") == "7 1\n"
    finally:
        await scaler.close()


async def test_a_replica_that_ends_by_itself_is_started_again_unless_its_settings_are_wrong(tmp_path: Path) -> None:
    def command(role: str) -> list[str]:
        return [sys.executable, "-c", CHILD if role == "rollout" else "raise SystemExit(2)", role]

    scaler = ProcessScaler(tmp_path, command=command, drain=1)
    try:
        first, wrong = await scaler.start("rollout"), await scaler.start("wrong")
        await until_logged(first.log)
        first.process.kill()
        async with asyncio.timeout(60):
            while scaler.list("rollout")[0].process.pid == first.process.pid:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert scaler.list("rollout")[0].running
        assert await wrong.process.wait() == 2
        assert scaler.list("wrong") == [wrong]
        # Asked for again, it is tried again.
        assert await scaler.scale("wrong", 1) == (0, 1)
        assert await scaler.list("wrong")[0].process.wait() == 2
    finally:
        await scaler.close()
