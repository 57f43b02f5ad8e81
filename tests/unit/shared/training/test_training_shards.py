"""Checkpoints of several ranks: bit for bit on any number of ranks; damage and full disks are everybody's error."""

import errno
import json
import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shared.config import ModelConfig, ParallelConfig, TrainingConfig
from shared.places import Local, place
from shared.training import checkpoint, shards
from shared.training.engine import Engine
from shared.training.errors import CheckpointError
from shared.training.group import ALONE, Group
from shared.training.parallel import plan_parallel
from shared.training.regions import Region, local
from shared.training.saving import Saved, StateCopy
from shared.training.sharding import load_policy
from shared.training.shards import LAYOUT, MODEL, model_pieces
from tests.fakes.ranks import run_ranks
from tests.unit.shared.training.test_training_engine import likelihood, make_block
from tests.unit.shared.training.test_training_sharded import OPTIMIZER, outline_of, whole_of

pytestmark = pytest.mark.timeout(240)
STATE = {"kl_coef": 0.25}


def make_engine(path: str, group: Group, parallel: dict[str, int]) -> Engine[Any]:
    config = TrainingConfig(optimizer=OPTIMIZER, parallel=ParallelConfig(**parallel))  # type: ignore[arg-type]
    plan = plan_parallel(config.parallel, group, "actor.parallel")
    return Engine(load_policy(ModelConfig(path=path), config, plan), config, seed=3, norm_length=16, parallel=plan)


def train(engine: Engine[Any], step: int) -> None:
    whole = make_block(seed=step)
    outline = outline_of(whole) if engine.parallel.group.size > 1 else None
    mine = whole if outline is None else whole.select(engine.my_rows(outline, step))
    engine.update(mine, likelihood(engine.model, "token-mean"), step=step, outline=outline)


def save(engine: Engine[Any], directory: str) -> Saved:
    state = STATE if engine.parallel.group.rank == 0 else {}
    copy = StateCopy("actor").take(engine.model, engine.optimizer, state, engine.parallel)
    return copy.write(place(directory))


def load(engine: Engine[Any], directory: str) -> dict[str, Any]:
    return checkpoint.load(place(directory), engine.model, engine.optimizer, role="actor", parallel=engine.parallel)


def parts(engine: Engine[Any]) -> list[torch.Tensor]:
    return [*(local(p.detach()).clone() for p in engine.model.parameters()), *engine.optimizer.state().values()]


def unchanged(engine: Engine[Any], before: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, before, parts(engine)))


def refused(work: Any) -> str:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


def on_rank(group: Group, job: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    root = Path(job["directory"])
    for name, parallel in job["cases"].items():
        engine = make_engine(job["model"], group, parallel)
        load(engine, job["one"])
        with torch.no_grad():
            result[f"{name} from one"] = [whole_of(p).flatten().tolist() for p in engine.model.parameters()]
        train(engine, 1)
        saved = save(engine, str(root / name))
        again = make_engine(job["model"], group, parallel)
        state = load(again, str(root / name))
        result[f"{name} again"] = unchanged(again, parts(engine)) and state == {**STATE, "optimizer_steps": 2}
        result[f"{name} digest"] = saved.digest
        with torch.no_grad():
            result[name] = [whole_of(p).flatten().tolist() for p in engine.model.parameters()]
        result["mishaps"] = mishaps(group, again, root / name)
    return result


def mishaps(group: Group, engine: Engine[Any], directory: Path) -> list[str]:
    """What all ranks say of a full disk, a disk of its own, and a damaged file of one rank; if nothing has changed."""
    before, keep = parts(engine), Local.put
    if group.rank == 1:
        Local.put = no_space
    full = refused(partial(save, engine, str(directory)))
    if group.rank == 1:
        Local.put = lambda *_: "0"
    own = refused(partial(save, engine, str(directory)))
    Local.put = keep
    path = directory / "rank-1" / MODEL
    content = path.read_bytes()
    group.exchange(None)
    if group.rank == 0:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    group.exchange(None)
    damaged = refused(partial(load, engine, str(directory)))
    group.exchange(None)
    if group.rank == 0:
        path.write_bytes(content)
    return [full, own, damaged, "unchanged" if unchanged(engine, before) else "changed"]


def no_space(*_: object) -> str:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_any_number_of_ranks_reads_what_any_number_wrote(tiny_llama: Path, tmp_path: Path) -> None:
    one = make_engine(str(tiny_llama), ALONE, {})
    train(one, 0)
    save(one, str(tmp_path / "one"))
    cases = {"fsdp": {}, "tp": {"tp": 2}}
    job = {"model": str(tiny_llama), "directory": str(tmp_path), "one": str(tmp_path / "one"), "cases": cases}
    results = run_ranks("tests.unit.shared.training.test_training_shards:on_rank", 2, job)
    written = [p.detach().flatten().tolist() for p in one.model.parameters()]
    train(one, 1)
    for name in cases:
        for rank in results:
            assert rank[f"{name} from one"] == written, "bit for bit"
            assert rank[f"{name} again"]
            assert rank[f"{name} digest"] == results[0][f"{name} digest"]
        if name == "fsdp":
            other = make_engine(str(tiny_llama), ALONE, {})
            assert load(other, str(tmp_path / name)) == {**STATE, "optimizer_steps": 2}
            for a, b, c in zip(other.model.parameters(), results[0][name], one.model.parameters(), strict=True):
                assert a.detach().flatten().tolist() == b, "bit for bit"
                torch.testing.assert_close(a, c, rtol=0, atol=1e-5)
            for key, moment in one.optimizer.state().items():
                torch.testing.assert_close(other.optimizer.state()[key], moment, rtol=1e-4, atol=1e-6)
    for rank in results:
        full, own, damaged, after = rank["mishaps"]
        assert re.search(r"No space left on device \(it needs \d+ bytes\) \(rank 1\)", full)
        assert "rank-1" in own
        assert "has to be one that all ranks see (rank 0)" in own
        assert f"rank-1/{MODEL}' is damaged" in damaged
        assert after == "unchanged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fsdp", "one", "tp"], "no draft is left"


cuts = st.lists(st.integers(0, 7), min_size=0, max_size=3, unique=True).map(lambda inner: [0, *sorted(inner), 7])


@given(cuts, cuts, st.data())
def test_a_box_is_read_from_whoever_wrote_parts_of_it(rows: list[int], columns: list[int], data: st.DataObject) -> None:
    """A 7 x 7 tensor cut anywhere; some of the pieces are empty."""
    whole = torch.arange(49.0).reshape(7, 7)
    with pytest.MonkeyPatch.context() as patch:
        held = {}
        for number, (top, bottom) in enumerate(pairwise(rows)):
            for other, (left, right) in enumerate(pairwise(columns)):
                region = Region((7, 7), (top, left), (bottom - top, right - left))
                held[Path(f"{number}.{other}")] = region, whole[region.slices]
        patch.setattr(shards, "safe_open", lambda file, _: _Opened(held[file][1]))
        pieces = shards.Pieces({"w": [(file, region) for file, (region, _) in held.items()]})
        start = data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
        size = data.draw(st.tuples(st.integers(0, 7 - start[0]), st.integers(0, 7 - start[1])))
        wanted = Region((7, 7), start, size)
        assert torch.equal(pieces.read("w", wanted, torch.float32), whole[wanted.slices])


class _Opened:
    """What safetensors' safe_open gives, of one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __enter__(self) -> "_Opened":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_slice(self, _: str) -> torch.Tensor:
        return self._tensor


def test_a_piece_that_nobody_wrote_is_missed(tmp_path: Path) -> None:
    directory = tmp_path / "rank-0"
    directory.mkdir()
    save_file({"w": torch.zeros(2, 3)}, directory / MODEL)
    (directory / LAYOUT).write_text(json.dumps({"w": {"shape": [4, 3], "offsets": [0, 0]}}))
    pieces = model_pieces(tmp_path)
    assert pieces.read("w", Region((4, 3), (0, 0), (2, 3)), torch.float32).shape == (2, 3)
    with pytest.raises(CheckpointError, match="only 6 of 9 elements of 'w'"):
        pieces.read("w", Region((4, 3), (0, 0), (3, 3)), torch.float32)
    for wanted, said in (
        (Region((5, 3), (0, 0), (2, 3)), "another model: 'w' is"),
        (Region((4, 3), (0, 0), (1, 3)), ""),
    ):
        with pytest.raises(CheckpointError, match=said or "is torch.float32"):
            pieces.read("w", wanted, torch.float32 if said else torch.float64)
    with pytest.raises(CheckpointError, match="has no 'v'"):
        pieces.read("v", Region((1,), (0,), (1,)), torch.float32)
