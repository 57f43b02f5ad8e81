"""Transfers over gloo: every rank is a thread with a group of its own; layouts, buckets, failures, fresh groups."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shared.gen.sextet.v1 import weights_pb2
from shared.rpc.errors import InvalidArgument
from shared.weights import codec, gather, group
from shared.weights.agreement import digests_of, piece_message
from shared.weights.digest import tensor_digest
from shared.weights.group import WireError, open_store
from shared.weights.part import WirePart
from shared.weights.plan import Box, Layout, Place, fused, replicated, sharded
from shared.weights.schedule import Bucket, Part

torch.set_num_threads(1)
HOST = "127.0.0.1"
CPU = torch.device("cpu")


def model(seed: int = 0, rows: int = 60) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    embed = torch.randn(rows, 16).bfloat16()
    return {
        "embed": embed,
        "q": torch.randn(16, 16),
        "k": torch.randn(8, 16),
        "v": torch.randn(8, 16),
        "o": torch.randn(16, 16),
        "norm": torch.randn(16),
        "scale": torch.tensor(2.0),
        "steps": torch.arange(3),
        "head": embed,
    }


@pytest.fixture(autouse=True)
def parts(monkeypatch) -> Iterator[list[WirePart]]:
    """All that a test makes; a process that ends with a group open is aborted."""
    made: list[WirePart] = []
    monkeypatch.setattr(
        WirePart, "__init__", lambda self, host, old=WirePart.__init__: made.append(self) or old(self, host)
    )
    yield made
    for part in made:
        part.close()


def in_threads(*works: Callable[[], Any], seconds: float = 60) -> list[Any]:
    """Results, or what was raised."""
    outcomes: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        try:
            outcomes[place] = works[place]()
        except Exception as error:  # noqa: BLE001
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "somebody waits for ever"
    return outcomes


def ranks_of(layout: Layout) -> list[weights_pb2.WeightRank]:
    count = 1 + max(piece.rank for piece in layout.pieces)
    return [
        weights_pb2.WeightRank(
            host="here", device="cpu", pieces=[piece_message(p) for p in layout.pieces if p.rank == rank]
        )
        for rank in range(count)
    ]


def cut(state: dict[str, torch.Tensor], layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """A rank's local buffers of a layout without fused ones."""
    local = {}
    for piece in layout.pieces:
        if piece.rank == rank:
            window = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
            local[piece.local] = state[piece.tensor][window].contiguous()
    return local


def agreed(state: dict[str, torch.Tensor], source: Layout, destination: Layout, bucket: int = 500, **fields: Any):
    senders, receivers = ranks_of(source), ranks_of(destination)
    store, endpoint = open_store(HOST)
    return store, weights_pb2.JoinResponse(
        channel="gloo", group=fields.pop("group", f"g{time.monotonic_ns()}"), store=endpoint,
        ranks=senders + receivers, senders=len(senders), manifest=codec.snapshot(1, state).manifest,
        bucket_bytes=bucket, seconds=fields.pop("seconds", 20.0),
        names=[f"actor{n}" for n in range(len(senders))] + [f"rollout{n}" for n in range(len(receivers))],
    )  # fmt: skip


DIMS = {"o": 1, "norm": -1, "scale": -1, "steps": -1}


@pytest.mark.parametrize(("senders", "tensor_parallel"), [(1, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("bucket", [64, 1 << 20])
def test_from_fsdp_shards_to_tensor_parallel_ranks_with_fused_and_tied_tensors(senders, tensor_parallel, bucket):
    state = model()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "head"}
    source = sharded(shapes, senders)
    wanted = dict(shapes)
    wanted["head"] = wanted.pop("embed")  # by its other name
    destination = fused(sharded(wanted, tensor_parallel, DIMS), {"qkv": ("q", "k", "v")})
    store, answer = agreed(state, source, destination, bucket)
    parts = [WirePart(HOST) for _ in answer.ranks]
    outcomes = in_threads(
        *(lambda r=r: parts[r].send(answer, r, cut(state, source, r), store) for r in range(senders)),
        *(lambda r=r: parts[r].receive(answer, r, CPU) for r in range(senders, len(parts))),
    )
    assert all(outcome is None for outcome in outcomes[:senders]), outcomes
    pieces = []
    for rank, (local, summed) in enumerate(outcomes[senders:]):
        pieces += summed
        own = cut({**state}, sharded(wanted, tensor_parallel, DIMS), rank)
        stacked = torch.cat([own.pop(name) for name in ("q", "k", "v")])
        for name, expected in {**own, "qkv": stacked}.items():
            assert torch.equal(local[name], expected), name
    assert digests_of(pieces, wanted) == {name: tensor_digest(state[name]) for name in wanted}


def unpacked(monkeypatch) -> list[int]:
    """Sizes of buffers that are packed into, as they are made."""
    from shared.weights import wire

    made: list[int] = []
    monkeypatch.setattr(
        wire._Buffers,
        "__missing__",
        lambda self, slot, old=wire._Buffers.__missing__: made.append(1) or old(self, slot),
    )
    return made


@pytest.mark.parametrize("bucket", [500, 3000, 1 << 20])
def test_nothing_is_packed_from_one_sender_to_whole_tensors(monkeypatch, bucket):
    """What is published lies in memory as it travels, and so does what arrives: no copy on either side."""
    state = {name: tensor for name, tensor in model().items() if name != "head"}
    held = codec.snapshot(1, state)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    store, answer = agreed(state, replicated(shapes, 1), replicated(shapes, 2), bucket)
    made = unpacked(monkeypatch)
    parts = [WirePart(HOST) for _ in range(3)]
    outcomes = in_threads(
        lambda: parts[0].send(answer, 0, held.by_name, store),
        *(lambda r=r: parts[r].receive(answer, r, CPU) for r in (1, 2)),
    )
    for local, _ in outcomes[1:]:
        assert all(torch.equal(local[name], tensor) for name, tensor in state.items())
    assert made == []
    schedule = parts[0]._agreed[1].schedule
    assert len(schedule.buckets) < len(shapes) or bucket == 500
    assert len(schedule.buckets) > 1 or bucket == 1 << 20


def test_who_keeps_older_tensors_gets_memory_for_each(monkeypatch):
    """One that stays while its neighbours are replaced would hold on to the memory of all of them."""
    state = {name: tensor for name, tensor in model().items() if name != "head"}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for keeps in ([], ["o"]):
        store, answer = agreed(state, replicated(shapes, 1), replicated(shapes, 1), 1 << 20)
        answer.ranks[1].keeps.extend(keeps)
        parts = [WirePart(HOST) for _ in range(2)]
        outcomes = in_threads(
            lambda p=parts, a=answer, s=store: p[0].send(a, 0, cut(state, replicated(shapes, 1), 0), s),
            lambda p=parts, a=answer: p[1].receive(a, 1, CPU),
        )
        local, _ = outcomes[1]
        assert all(torch.equal(local[name], tensor) for name, tensor in state.items())
        memories = {tensor.untyped_storage().data_ptr() for tensor in local.values()}
        assert len(memories) == (len(shapes) if keeps else 1)


def test_bytes_between_two_parts_are_written_only_where_no_tensor_is():
    """A bucket leaves 156 bytes between `a` and `c`: another sender's, if both lie in one buffer of the receiver's."""
    from shared.weights import wire

    memory = torch.zeros(128)
    a, c = memory[:25], memory[64:]
    parts = [
        Part(name, Box((0,), tuple(own.shape)), Place(0, name, (0,)), (), offset, own.nbytes)
        for name, own, offset in (("a", a, 0), ("c", c, 256))
    ]
    bucket = Bucket(0, tuple(parts))
    assert wire._in_place(bucket, [a, c], [memory, memory]) is None
    assert wire._in_place(bucket, [a, c], [memory[:40], c]) is None, "the rest of a's buffer lies between"
    assert wire._in_place(bucket, [a, c], [a, memory[60:]]) is None, "c's buffer begins before c"
    assert wire._in_place(bucket, [a, c.clone()], [a, c]) is None
    assert wire._in_place(bucket, [a, memory[65:]], [a, memory[65:]]) is None
    flat = wire._in_place(bucket, [a, c], [a, c])
    assert flat is not None
    assert (flat.data_ptr(), flat.numel(), flat.dtype) == (a.data_ptr(), 512, torch.uint8)


def test_a_group_holds_on_to_nothing_that_it_brought():
    """Neither to what arrived, which is a model's weight in memory, nor to what it was packed in."""
    state = {name: tensor for name, tensor in model().items() if name != "head"}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    store, answer = agreed(state, replicated(shapes, 1), replicated(shapes, 1), 500)
    parts = [WirePart(HOST), WirePart(HOST)]
    outcomes = in_threads(
        lambda: parts[0].send(answer, 0, cut(state, replicated(shapes, 1), 0), store),
        lambda: parts[1].receive(answer, 1, CPU),
    )
    arrived = [StorageWeakRef(tensor.untyped_storage()) for tensor in outcomes.pop()[0].values()]
    assert all(storage.expired() for storage in arrived)
    assert parts[1].holds


def test_two_replicas_of_different_tensor_parallel_sizes_at_once():
    state = model()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "head"}
    source, one, two = replicated(shapes, 1), replicated(shapes, 1), sharded(shapes, 2, DIMS)
    moved = tuple(p.__class__(p.tensor, p.box, p.rank + 1, p.local, p.offset) for p in two.pieces)
    store, answer = agreed(state, source, Layout(one.pieces + moved))
    parts = [WirePart(HOST) for _ in range(4)]
    outcomes = in_threads(
        lambda: parts[0].send(answer, 0, cut(state, source, 0), store),
        *(lambda r=r: parts[r].receive(answer, r, CPU) for r in (1, 2, 3)),
    )
    expected = {name: tensor_digest(state[name]) for name in shapes}
    assert digests_of(outcomes[1][1], shapes) == expected
    assert digests_of(outcomes[2][1] + outcomes[3][1], shapes) == expected


@pytest.mark.parametrize(("sees", "expected"), [((), {(0, 3), (1, 2)}), (("g0", "g1"), set())])
def test_what_a_receiver_can_map_is_not_sent(monkeypatch, sees, expected):
    """Two senders on two GPUs, receivers on both: own halves and what is seen are copied from the senders' memory.

    Memory here is the CPU's; who maps which piece of it, and where it goes, is what is looked at.
    """
    from shared.weights import memory

    state = model()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "head"}
    source, destination = sharded(shapes, 2), fused(sharded(shapes, 2, DIMS), {"qkv": ("q", "k", "v")})
    held = [codec.snapshot(1, cut(state, source, rank)) for rank in (0, 1)]
    store, answer = agreed(state, source, destination)
    for number, rank in enumerate(answer.ranks):
        rank.device = f"g{number % 2}"
        rank.sees.extend(sees if number > 1 else ())
    for number in (0, 1):
        places = {piece.tensor: piece.at for piece in held[number].pieces}
        answer.ranks[number].memory.device = number
        for piece in answer.ranks[number].pieces:
            piece.at = places[piece.tensor]
    monkeypatch.setattr(memory, "map_memory", lambda shared, uuid: held[shared.device].memory)
    parts = [WirePart(HOST) for _ in range(4)]
    outcomes = in_threads(
        *(lambda r=r: parts[r].send(answer, r, held[r].by_name, store) for r in (0, 1)),
        *(lambda r=r: parts[r].receive(answer, r, CPU) for r in (2, 3)),
    )
    assert outcomes[:2] == [None, None]
    found = digests_of(outcomes[2][1] + outcomes[3][1], shapes)
    assert found == {name: tensor_digest(state[name]) for name in shapes}
    schedule = parts[0]._agreed[1].schedule
    assert {route.ranks for route in schedule.routes} == expected
    assert schedule.mapped


def test_a_group_is_used_again_and_a_member_that_gives_up_ends_it_for_all(monkeypatch):
    state = model()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "head"}
    store, answer = agreed(state, replicated(shapes, 1), replicated(shapes, 2))
    parts = [WirePart(HOST) for _ in range(3)]

    def once() -> list[Any]:
        return in_threads(
            lambda: parts[0].send(answer, 0, state, store),
            *(lambda r=r: parts[r].receive(answer, r, CPU) for r in (1, 2)),
        )

    made = []
    monkeypatch.setattr(group, "_backend", lambda *args, old=group._backend: made.append(1) or old(*args))
    for _ in range(3):
        assert once()[0] is None
    assert len(made) == 3, "one route, three ranks, once"
    assert {part.holds for part in parts} == {answer.group}
    parts[1]._group.broadcast = lambda *_: 1 / 0
    outcomes = once()
    for outcome in outcomes:
        assert isinstance(outcome, WireError)
        assert "ZeroDivisionError" in str(outcome), outcomes
    assert {part.holds for part in parts} == {""}


def test_what_a_failed_transfer_may_still_write_is_held_until_it_has(monkeypatch):
    """The stream and its event are a GPU's: others take their places here."""
    ended: list[bool] = []

    class Event:
        def record(self, stream: Any) -> None:
            assert stream == "its stream"

        def query(self) -> bool:
            return bool(ended)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("shared.weights.part.run", lambda *_: 1 / 0)
    state, part = model(), WirePart(HOST)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "head"}
    store, answer = agreed(state, replicated(shapes, 1), replicated(shapes, 1))
    part._stream = "its stream"
    outcomes = in_threads(lambda: part.send(answer, 0, state, store), lambda: WirePart(HOST).receive(answer, 1, CPU))
    assert "ZeroDivisionError" in str(outcomes[0])
    [(_, held)] = part._left
    assert held is state
    monkeypatch.setattr(WirePart, "_joined", lambda *_: 1 / 0)
    with pytest.raises(WireError):
        part.send(answer, 0, state, store)
    assert len(part._left) == 1, "it may still write"
    ended.append(True)
    with pytest.raises(WireError):
        part.send(answer, 0, state, store)
    assert part._left == []


def test_a_member_that_stays_away_is_named(monkeypatch):
    monkeypatch.setattr(group, "MEET_SECONDS", 2.0)
    state = model()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "head"}
    store, answer = agreed(state, replicated(shapes, 1), replicated(shapes, 2))
    part, other = WirePart(HOST), WirePart(HOST)
    outcomes = in_threads(lambda: part.send(answer, 0, state, store), lambda: other.receive(answer, 1, CPU))
    assert all("rollout1 did not join the group" in str(outcome) for outcome in outcomes), outcomes
    until = time.monotonic() + 30
    while "weights-watch" in {thread.name for thread in threading.enumerate()}:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_stops_answering_ends_the_transfer_within_its_time(rank):
    """One side never starts a broadcast; the other one's deadline holds."""
    state = model()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "head"}
    store, answer = agreed(state, replicated(shapes, 1), replicated(shapes, 1))
    parts = [WirePart(HOST), WirePart(HOST)]
    works = [
        lambda: parts[0].send(answer, 0, state, store),
        lambda: parts[1].receive(answer, 1, CPU),
    ]
    in_threads(*works)
    answer.seconds = 1.0
    parts[rank]._group.broadcast = lambda *_: time.sleep(4) or 1 / 0
    outcomes = in_threads(*works, seconds=15)
    assert f"{answer.names[rank]} did not answer in time" in str(outcomes[1 - rank]), outcomes


def test_a_group_that_never_comes_about_costs_its_own_transfer_only(monkeypatch):
    """NCCL waits without end for a member that died on its way into a group, in a thread that nobody can stop."""
    monkeypatch.setattr("shared.weights.part.GRACE_SECONDS", 0.1)
    state, reached, ended = model(), threading.Event(), threading.Event()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "head"}
    parts = [WirePart(HOST), WirePart(HOST)]

    def hanging(*args: Any, old: Any = group._backend) -> Any:
        if threading.current_thread().name == "hangs":
            reached.set()
            ended.wait()
        return old(*args)

    monkeypatch.setattr(group, "_backend", hanging)
    layouts = replicated(shapes, 1), replicated(shapes, 1)
    store, lost = agreed(state, *layouts, seconds=3.0)
    outcome: list[Any] = []

    def send() -> None:
        with pytest.raises(WireError):
            parts[0].send(lost, 0, state, store)
        outcome.append("ended")

    thread = threading.Thread(target=send, name="hangs", daemon=True)
    thread.start()
    [error] = in_threads(lambda: parts[1].receive(lost, 1, CPU))
    assert isinstance(error, WireError)
    assert reached.is_set()
    time.sleep(max(0.0, parts[0]._until - time.monotonic()) + 0.1)
    other, answer = agreed(state, *layouts)
    for _ in range(2):
        outcomes = in_threads(lambda: parts[0].send(answer, 0, state, other), lambda: parts[1].receive(answer, 1, CPU))
        assert outcomes[0] is None, outcomes
        assert digests_of(outcomes[1][1], shapes) == {name: tensor_digest(state[name]) for name in shapes}
        # Whoever was left behind comes back one day, and harms nobody.
        ended.set()
        thread.join(30)
        assert outcome == ["ended"]
    assert parts[0].holds == parts[1].holds == answer.group


def test_channels_that_cannot_be_are_refused_by_name():
    held = codec.snapshot(1, model())
    assert gather.offers(held, "auto") == []
    assert gather.offers(held, "grpc") == []
    with pytest.raises(InvalidArgument, match=r"weights\.channel=nccl, but the policy is on the CPU: use auto"):
        gather.offers(held, "nccl")
