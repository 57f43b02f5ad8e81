import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.batch.codec import Corrupt, TooLarge
from shared.gen.sextet.v1 import weights_pb2
from shared.weights import codec
from shared.weights.digest import state_digest

torch.set_num_threads(1)

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def states(draw) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=5))
    state: dict[str, torch.Tensor] = {}
    for name in names:
        if state and draw(st.booleans()):
            state[name] = state[draw(st.sampled_from(list(state)))]
        else:
            state[name] = (torch.randn(draw(shapes)) * 3).to(draw(dtypes))
    return state


def ref_of(held: codec.Snapshot) -> weights_pb2.WeightsRef:
    manifest = held.manifest
    return weights_pb2.WeightsRef(version=manifest.version, digest=manifest.digest, bytes=held.nbytes)


def wire(held: codec.Snapshot) -> list[bytes]:
    messages = [weights_pb2.FetchResponse(manifest=held.manifest), *codec.messages(held.tensors)]
    return [message.SerializeToString() for message in messages]


def receive(ref: weights_pb2.WeightsRef, messages: list[bytes], max_bytes: int = 1 << 30) -> dict[str, torch.Tensor]:
    receiver = codec.Receiver(ref, max_bytes)
    for message in messages:
        receiver.add(weights_pb2.FetchResponse.FromString(message))
    return receiver.finish()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Same names in the same order, same dtypes and shapes, same bits."""
    return list(a) == list(b) and state_digest(a) == state_digest(b)


def model() -> dict[str, torch.Tensor]:
    embed = torch.randn(40, 8).bfloat16()
    return {"embed": embed, "norm": torch.randn(8), "big": torch.randn(600_000), "head": embed}


@settings(deadline=None)
@given(states())
def test_round_trip(state):
    held = codec.snapshot(5, state)
    received = receive(ref_of(held), wire(held))
    assert same(received, state)
    assert state_digest(received) == held.manifest.digest
    for name, tensor in state.items():
        for other in state:
            if state[other] is tensor and tensor.numel():
                assert received[other] is received[name]


def test_tied_tensors_travel_once():
    state = model()
    held = codec.snapshot(1, state)
    untied = codec.snapshot(1, state | {"head": state["head"].clone()})
    assert held.nbytes == untied.nbytes - state["head"].nbytes
    assert held.manifest.digest == untied.manifest.digest
    assert sum(map(len, wire(held))) < held.nbytes + 2000
    received = receive(ref_of(held), wire(held))
    assert received["head"].data_ptr() == received["embed"].data_ptr()


def test_a_snapshot_stays_as_it_was():
    state = model()
    before = {name: tensor.clone() for name, tensor in state.items()}
    held = codec.snapshot(1, state)
    for tensor in state.values():
        tensor.zero_()
    assert same(receive(ref_of(held), wire(held)), before)


def test_parameters_that_require_grad_are_published():
    held = codec.snapshot(1, {"w": torch.nn.Parameter(torch.ones(3))})
    assert not receive(ref_of(held), wire(held))["w"].requires_grad


def test_any_flipped_byte_is_refused():
    held = codec.snapshot(3, {"a": torch.randn(5), "b": torch.randn(2, 2).bfloat16(), "c": torch.tensor(1)})
    ref, messages = ref_of(held), wire(held)
    expected = receive(ref, messages)
    for which, message in enumerate(messages):
        for place in range(len(message)):
            damaged = bytearray(message)
            damaged[place] ^= 0xFF
            try:
                received = receive(ref, [*messages[:which], bytes(damaged), *messages[which + 1 :]])
            except (Corrupt, TooLarge, DecodeError):
                continue
            assert same(received, expected)


def test_a_flipped_byte_under_a_right_checksum_names_the_tensor():
    """Memory that went bad on the sender after the digest was made."""
    held = codec.snapshot(1, model())
    held.tensors[1][3] += 1
    with pytest.raises(Corrupt, match="tensor 'norm' has digest"):
        receive(ref_of(held), wire(held))


def test_a_bad_checksum_names_the_tensor():
    held = codec.snapshot(1, model())
    messages = [weights_pb2.FetchResponse.FromString(message) for message in wire(held)]
    messages[2].checksum ^= 1
    with pytest.raises(Corrupt, match="chunk of tensor 'big'"):
        receive(ref_of(held), [message.SerializeToString() for message in messages])


def test_cut_at_any_chunk_doubled_or_reordered():
    held = codec.snapshot(1, model())
    ref, messages = ref_of(held), wire(held)
    assert len(messages) == 4
    for count in range(len(messages)):
        with pytest.raises(Corrupt, match="ended"):
            receive(ref, messages[:count])
    with pytest.raises(Corrupt, match="more bytes"):
        receive(ref, [*messages, messages[-1]])
    with pytest.raises(Corrupt, match="tensor 'embed'"):
        receive(ref, [messages[0], messages[2], messages[1], messages[3]])
    with pytest.raises(Corrupt, match="does not begin with a manifest"):
        receive(ref, messages[1:])


def test_another_version_than_asked_for_is_refused():
    state = model()
    ref = ref_of(codec.snapshot(1, state))
    with pytest.raises(Corrupt, match="version 2 arrives instead of 1"):
        receive(ref, wire(codec.snapshot(2, state)))


def test_other_weights_of_the_same_version_are_refused():
    """A holder that was reset and has trained otherwise since."""
    ref = ref_of(codec.snapshot(1, model()))
    other = codec.snapshot(1, model())
    with pytest.raises(Corrupt, match=f"version 1 has digest {other.manifest.digest}, not {ref.digest}"):
        receive(ref, wire(other)[:1])


def test_too_much_is_refused_before_memory_is_taken():
    held = codec.snapshot(1, {"huge": torch.zeros(8)})
    ref = ref_of(held)
    with pytest.raises(TooLarge, match="version 1 has 32 bytes, 31 are allowed"):
        receive(ref, wire(held), max_bytes=31)
    info = held.manifest.tensors[0]
    del info.shape[:]
    info.shape.append(1 << 40)
    info.bytes = 4 << 40
    with pytest.raises(Corrupt, match=f"{4 << 40} bytes, not 32"):
        receive(ref, wire(held))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda i: i[1].MergeFrom(weights_pb2.TensorInfo(name="embed")), "'embed' is announced twice"),
        (lambda i: i[0].MergeFrom(weights_pb2.TensorInfo(dtype="complex64")), "announced as complex64"),
        (lambda i: i[0].shape.append(2), "announced with 640 bytes, not 1280"),
        (lambda i: i[0].shape.extend([-1, -1]), "announced as bfloat16"),
        (lambda i: i[3].MergeFrom(weights_pb2.TensorInfo(alias_of="nobody")), "does not come before it"),
        (lambda i: i[0].MergeFrom(weights_pb2.TensorInfo(alias_of="head")), "does not come before it"),
        (lambda i: i[3].MergeFrom(weights_pb2.TensorInfo(alias_of="big")), "differs from it"),
        (lambda i: i[3].MergeFrom(weights_pb2.TensorInfo(bytes=4)), "differs from it"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change, says):
    held = codec.snapshot(1, model())
    ref = ref_of(held)
    change(held.manifest.tensors)
    with pytest.raises(Corrupt, match=says):
        receive(ref, wire(held))


def test_a_dtype_that_does_not_travel_is_named():
    with pytest.raises(ValueError, match="'w' is complex64"):
        codec.snapshot(1, {"w": torch.zeros(2, dtype=torch.complex64)})


@settings(deadline=None)
@given(states(), st.sampled_from([torch.bfloat16, torch.float32]))
def test_a_dtype_is_that_of_the_copies_and_ties_stay(state, dtype):
    held = codec.snapshot(1, state, dtype)
    wanted = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    received = receive(ref_of(held), wire(held))
    assert same(received, wanted)
    for name, tensor in state.items():
        for other, twin in state.items():
            if tensor is twin and tensor.numel():
                assert received[name] is received[other]
