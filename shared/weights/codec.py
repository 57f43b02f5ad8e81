"""Tensors to protobuf and back: the twin of shared/batch/codec.py. A tensor counts only when its digest matches."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from shared.batch.codec import Corrupt, TooLarge, chunks_of
from shared.gen.sextet.v1 import weights_pb2
from shared.weights.agreement import digests_of
from shared.weights.digest import Fingerprint, dtype_name, on_host, raw_bytes, tensor_digest, tied, total_digest
from shared.weights.layout import local_part
from shared.weights.schedule import ALIGNMENT, wire_order
from shared.weights.sums import box_sums

DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True)
class Snapshot:
    """A version at rest on one rank: its manifest and its tensors where they were, tied ones once, in sending order.

    Attributes:
        pieces: what the tensors are of the whole ones, with the sums of each; see `complete`.
        memory: where all of them lie, uint8.
        ranks: where the maker is several processes: all of them with what they hold, in order.
    """

    manifest: weights_pb2.WeightsManifest
    tensors: tuple[Tensor, ...]
    pieces: tuple[weights_pb2.WeightPiece, ...]
    memory: Tensor
    ranks: tuple[weights_pb2.WeightRank, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def whole_bytes(self) -> int:
        """Of the tensors as they travel, whatever this rank holds of them."""
        return sum(info.bytes for info in self.manifest.tensors)

    @property
    def by_name(self) -> dict[str, Tensor]:
        return {piece.tensor: tensor for piece, tensor in zip(self.pieces, self.tensors, strict=True)}


@dataclass(frozen=True)
class Kept:
    """Tensors that are here already, verified with an earlier version, and their digests; by name, tied ones too."""

    digests: Mapping[str, str]
    tensors: Mapping[str, Tensor]


NOTHING = Kept({}, {})


def unchanged(manifest: weights_pb2.WeightsManifest, has: Mapping[str, str]) -> set[str]:
    """Names of the tensors that need not travel to who has tensors with these digests."""
    return {i.name for i in manifest.tensors if not i.alias_of and i.digest and has.get(i.name) == i.digest}


def bytes_to(manifest: weights_pb2.WeightsManifest, has: Mapping[str, str]) -> int:
    """Bytes that travel to who has tensors with these digests."""
    kept = unchanged(manifest, has)
    return sum(info.bytes for info in manifest.tensors if info.name not in kept)


def snapshot(
    version: int, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, exact: Collection[str] = ()
) -> Snapshot:
    """Copies the tensors where they are and sums them up; of a DTensor, what this rank holds.

    Args:
        dtype: of floating-point tensors in the copy, without another copy on the way; None: as they are.
        exact: names of tensors that stay as they are whatever `dtype` says.

    Raises:
        ValueError: a dtype or placement that does not travel; the tensor is named.
    """
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    aliases = tied({name: local for name, (local, _) in parts.items()})
    manifest = weights_pb2.WeightsManifest(version=version)
    infos: dict[str, weights_pb2.TensorInfo] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, tensor in tensors.items():
        made = dtypes[name] = _dtype(tensor, None if name in exact else dtype)
        if dtype_name(made) not in DTYPES:
            raise ValueError(f"tensor {name!r} is {dtype_name(made)}; what travels is {', '.join(DTYPES)}")
        info = manifest.tensors.add(name=name, dtype=dtype_name(made), shape=tensor.shape)
        if name in aliases:
            info.alias_of = aliases[name]
            continue
        info.bytes = math.prod(tensor.shape) * made.itemsize
        infos[name] = info
    memory, places, copies = _packed({name: parts[name][0] for name in infos}, dtypes)
    sums = on_host([box_sums(c, parts[n][1].start, tensors[n].shape) for n, c in zip(infos, copies, strict=True)])
    pieces = tuple(
        weights_pb2.WeightPiece(tensor=n, start=parts[n][1].start, size=parts[n][1].size, sums=each, at=places[n])
        for n, each in zip(infos, sums, strict=True)
    )
    return complete(Snapshot(manifest, tuple(copies), pieces, memory), pieces)


def _packed(
    tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> tuple[Tensor, dict[str, int], list[Tensor]]:
    """One piece of memory (which another process maps at once), where each copy begins in it, and the copies."""
    order = wire_order({name: dtypes[name].itemsize for name in tensors})
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    memory, places, made = laid_out({name: (dtypes[name], tensors[name].shape) for name in order}, device)
    return memory, places, [made[name].copy_(tensor.detach()) for name, tensor in tensors.items()]


def laid_out(
    wanted: Mapping[str, tuple[torch.dtype, Sequence[int]]], device: torch.device
) -> tuple[Tensor, dict[str, int], dict[str, Tensor]]:
    """Empty tensors one after another in one piece of memory: the memory, uint8, at which byte each begins, and they.

    Args:
        wanted: dtype and shape of each, in order.
    """
    places, used = {}, 0
    for name, (dtype, shape) in wanted.items():
        places[name] = used
        used = -(-(used + math.prod(shape) * dtype.itemsize) // ALIGNMENT) * ALIGNMENT
    memory, tensors = torch.empty(used, dtype=torch.uint8, device=device), {}
    for name, (dtype, shape) in wanted.items():
        flat = memory[places[name] : places[name] + math.prod(shape) * dtype.itemsize]
        tensors[name] = flat.view(dtype).view(tuple(shape))
    return memory, places, tensors


def _dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def complete(held: Snapshot, pieces: Iterable[weights_pb2.WeightPiece]) -> Snapshot:
    """The snapshot with the digests of the whole tensors, from the pieces of all ranks.

    A rank that does not hold everything has none until then.

    Raises:
        ValueError: ranks differ; the tensor is named.
    """
    infos = {info.name: info for info in held.manifest.tensors}
    for name, digest in digests_of(pieces, {info.name: info.shape for info in infos.values()}).items():
        infos[name].digest = digest
    for info in held.manifest.tensors:
        info.digest = infos[info.alias_of or info.name].digest
    held.manifest.digest = manifest_digest(held.manifest)
    return held


def messages(tensors: Iterable[Tensor]) -> Iterator[weights_pb2.FetchResponse]:
    """What follows the manifest in the stream: the bytes."""
    for chunk in chunks_of(raw_bytes(tensor.cpu()) for tensor in tensors):
        yield weights_pb2.FetchResponse(chunk=chunk, checksum=xxhash.xxh3_64_intdigest(chunk))


class Receiver:
    """Makes tensors of a stream's messages; memory is taken once, for the tensors themselves.

    Args:
        ref: what was asked for; anything else is refused.
        max_bytes: more is refused before memory is taken.
        kept: tensors that are here already; the stream leaves out those that are still the version's.
    """

    def __init__(self, ref: weights_pb2.WeightsRef, max_bytes: int, kept: Kept = NOTHING) -> None:
        self._ref = ref
        self._max_bytes = max_bytes
        self._kept = kept
        self._manifest: weights_pb2.WeightsManifest | None = None
        self._tensors: dict[str, Tensor] = {}
        self._slots: deque[_Slot] = deque()

    def add(self, message: weights_pb2.FetchResponse) -> None:
        """Raises Corrupt or TooLarge; the tensor is named."""
        if self._manifest is not None:
            self._fill(message.chunk, message.checksum)
        elif message.WhichOneof("content") == "manifest":
            self._start(message.manifest)
        else:
            raise Corrupt("the stream does not begin with a manifest")

    def finish(self) -> dict[str, Tensor]:
        """The tensors by name, tied names sharing one, once the stream has ended. Raises Corrupt."""
        if self._manifest is None:
            raise Corrupt("the stream ended before the manifest")
        if self._slots:
            raise Corrupt(f"the stream ended within tensor {self._slots[0].info.name!r}")
        return by_every_name(self._manifest, self._tensors)

    def _start(self, manifest: weights_pb2.WeightsManifest) -> None:
        _check_manifest(manifest, self._ref)
        if self._ref.bytes > self._max_bytes:
            raise TooLarge(f"version {manifest.version} has {self._ref.bytes} bytes, {self._max_bytes} are allowed")
        self._manifest = manifest
        here = unchanged(manifest, self._kept.digests)
        for info in manifest.tensors:
            if info.name in here:
                self._tensors[info.name] = self._kept.tensors[info.name]
            elif not info.alias_of:
                self._tensors[info.name] = torch.empty(tuple(info.shape), dtype=DTYPES[info.dtype])
                self._slots.append(_Slot(info, self._tensors[info.name]))
        self._verify_full()

    def _fill(self, chunk: bytes, checksum: int) -> None:
        if not self._slots:
            raise Corrupt(f"more bytes than the {self._ref.bytes} announced")
        if not chunk or xxhash.xxh3_64_intdigest(chunk) != checksum:
            raise Corrupt(f"a chunk of tensor {self._slots[0].info.name!r} does not match its checksum")
        rest = memoryview(chunk)
        while rest:
            if not self._slots:
                raise Corrupt(f"more bytes than the {self._ref.bytes} announced")
            rest = self._slots[0].take(rest)
            self._verify_full()

    def _verify_full(self) -> None:
        while self._slots and self._slots[0].missing == 0:
            self._slots.popleft().verify()


class _Slot:
    """A tensor being received."""

    def __init__(self, info: weights_pb2.TensorInfo, tensor: Tensor) -> None:
        self.info = info
        self._tensor, self._view = tensor, raw_bytes(tensor)
        self._filled = 0

    @property
    def missing(self) -> int:
        return len(self._view) - self._filled

    def take(self, data: memoryview) -> memoryview:
        """Keeps what belongs to this tensor and returns the rest."""
        part = data[: self.missing]
        self._view[self._filled : self._filled + len(part)] = part
        self._filled += len(part)
        return data[len(part) :]

    def verify(self) -> None:
        digest = tensor_digest(self._tensor)
        if digest != self.info.digest:
            raise Corrupt(f"tensor {self.info.name!r} has digest {digest}, not {self.info.digest}")


def _check_manifest(manifest: weights_pb2.WeightsManifest, ref: weights_pb2.WeightsRef) -> None:
    """The manifest is consistent and is that of the ref."""
    if manifest.version != ref.version:
        raise Corrupt(f"version {manifest.version} arrives instead of {ref.version}")
    sent: dict[str, weights_pb2.TensorInfo] = {}
    for info in manifest.tensors:
        if info.name in sent:
            raise Corrupt(f"tensor {info.name!r} is announced twice")
        _check_info(info, sent)
        sent[info.name] = info
    total = sum(info.bytes for info in manifest.tensors)
    if total != ref.bytes:
        raise Corrupt(f"version {ref.version} is announced with {total} bytes, not {ref.bytes}")
    # Each tensor is held to its digest here, and the digests to the publisher's: the holder alone is not trusted.
    if not manifest.digest == manifest_digest(manifest) == ref.digest:
        raise Corrupt(f"version {ref.version} has digest {manifest_digest(manifest)}, not {ref.digest}")


def _check_info(info: weights_pb2.TensorInfo, before: Mapping[str, weights_pb2.TensorInfo]) -> None:
    if info.dtype not in DTYPES or any(size < 0 for size in info.shape):
        raise Corrupt(f"tensor {info.name!r} is announced as {info.dtype} {list(info.shape)}")
    size = math.prod(info.shape) * DTYPES[info.dtype].itemsize
    if not info.alias_of:
        if info.bytes != size:
            raise Corrupt(f"tensor {info.name!r} is announced with {info.bytes} bytes, not {size}")
        return
    target = before.get(info.alias_of)
    if target is None or target.alias_of:
        raise Corrupt(f"tensor {info.name!r} shares {info.alias_of!r}, which does not come before it")
    if info.bytes or (info.dtype, info.shape, info.digest) != (target.dtype, target.shape, target.digest):
        raise Corrupt(f"tensor {info.name!r} shares {info.alias_of!r} and differs from it")


def by_every_name(manifest: weights_pb2.WeightsManifest, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that travelled, a tied one under each of its names."""
    return {info.name: tensors[info.alias_of or info.name] for info in manifest.tensors}


def manifest_digest(manifest: weights_pb2.WeightsManifest) -> str:
    """The version's digest, of what the manifest says of its tensors."""
    return total_digest(Fingerprint(i.name, i.dtype, tuple(i.shape), i.digest) for i in manifest.tensors)
