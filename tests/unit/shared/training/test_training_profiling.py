"""The profiler looks on: same bits with and without, a trace that parses, and no failure of its own is the work's."""

import gzip
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared.gen.sextet.v1 import actor_pb2, common_pb2
from shared.rpc.errors import InvalidArgument
from shared.training import profiling
from shared.training.group import ALONE
from shared.training.profiling import Recorder, profiled
from shared.training.role import compute


def train(device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(256, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


class Worker:
    """A servicer of one rank; `work` is what it computes."""

    group = ALONE

    def __init__(self, work: Any) -> None:
        self._work = work

    @profiled
    async def update(self, request: actor_pb2.ActorServiceUpdateRequest) -> actor_pb2.ActorServiceUpdateResponse:
        self.made = await compute(self._work)
        return actor_pb2.ActorServiceUpdateResponse(version=1)


def wanted(prefix: Path) -> actor_pb2.ActorServiceUpdateRequest:
    return actor_pb2.ActorServiceUpdateRequest(profile=common_pb2.Profiling(prefix=str(prefix)))


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def trace_of(path: str) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


async def test_the_same_bits_with_and_without(tmp_path: Path) -> None:
    plain, looked_at = Worker(train), Worker(train)
    answer = await plain.update(actor_pb2.ActorServiceUpdateRequest())
    assert not answer.profile
    answer = await looked_at.update(wanted(tmp_path / "traces" / "step-1-actor.update"))
    assert all(map(torch.equal, plain.made, looked_at.made))
    (seen,) = answer.profile
    assert (seen.rank, seen.fault) == (0, "")
    assert seen.path == str(tmp_path / "traces" / "step-1-actor.update-rank-0.json.gz")
    assert names(tmp_path / "traces") == ["step-1-actor.update-rank-0.json.gz"]
    operators = [event["name"] for event in trace_of(seen.path) if event.get("cat") == "cpu_op"]
    assert operators.count("aten::gelu") == 3
    assert (0 < seen.compute_share <= 1, seen.communication_share) == (True, 0)
    assert next(top for top in seen.top if top.name == "aten::addmm").calls == 6
    assert seen.memory_peak_gib > 0


async def test_what_fails_in_the_profiler_costs_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    worker = Worker(lambda: 7)
    (seen,) = (await worker.update(wanted(tmp_path / "file" / "step-1"))).profile
    assert (worker.made, seen.path) == (7, "")
    assert seen.fault.startswith(("NotADirectoryError", "FileExistsError"))
    assert seen.seconds > 0

    def broken() -> Any:
        raise RuntimeError("no profiler here")

    monkeypatch.setattr(profiling, "_begin", broken)
    (seen,) = (await worker.update(wanted(tmp_path / "step-2"))).profile
    assert (worker.made, seen.fault) == (7, "RuntimeError: no profiler here")
    assert names(tmp_path) == ["file"]


async def test_a_trace_goes_to_no_place_that_depends_on_where_the_process_runs() -> None:
    (seen,) = (await Worker(lambda: 7).update(wanted(Path("here")))).profile
    assert (seen.path, seen.fault) == ("", "ValueError: profile.prefix: 'here-rank-0.json.gz' is not absolute")


async def test_work_that_fails_fails_as_ever_and_leaves_the_profiler_free(tmp_path: Path) -> None:
    def work() -> None:
        raise ValueError("bad rows")

    with pytest.raises(InvalidArgument, match="bad rows"):
        await Worker(work).update(wanted(tmp_path / "step-1"))
    assert names(tmp_path) == []
    (seen,) = (await Worker(train).update(wanted(tmp_path / "step-2"))).profile
    assert seen.fault == ""


def test_time_that_nothing_computes_in_is_no_share(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.json.gz", 3)
    recorder.record(lambda: (time.sleep(1.5), torch.ones(10).sum()))
    recorder.keep()
    assert recorder.seen.rank == 3
    assert recorder.seen.seconds >= 1.5
    assert recorder.seen.compute_share < 0.5


@pytest.mark.gpu
async def test_kernels_are_what_a_gpu_computes(tmp_path: Path) -> None:
    worker = Worker(lambda: train("cuda"))
    await worker.update(actor_pb2.ActorServiceUpdateRequest())
    plain = worker.made
    (seen,) = (await worker.update(wanted(tmp_path / "step-1"))).profile
    assert (seen.fault, all(map(torch.equal, plain, worker.made))) == ("", True)
    assert 0 < seen.compute_share <= 1
    assert math.isclose(seen.memory_peak_gib, torch.cuda.max_memory_allocated() / 2**30, rel_tol=0.5)
    assert not any(top.name.startswith("aten::") for top in seen.top)
    assert any(event.get("cat") == "kernel" for event in trace_of(seen.path))
