"""Sums over the bytes of a tensor that its shards add up to: how ranks agree on a tensor that none of them holds whole.

A tensor is a matrix of bytes: one row for each index of its leading dimensions. Byte u (-128 ... 127) in row r and
column c adds A(r, c div 65536) * B(c mod 65536, k) * u to sum k of eight, modulo 2^64, with fixed pseudo-random odd
numbers A (64 bits) and B (8 bits). So the sums depend on the position of every byte, any single changed byte changes
all of them, and the sums of a tensor are those of its pieces added up, however it is cut. The inner product is an
int8 matrix product, exact in int32, which runs at the speed of the memory on tensor cores; where there is none, float32
products that are exact, too. Not a cryptographic digest: it keeps accidents apart, and the numbers it is compared with
come from authenticated calls.
"""

import contextlib
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

SUMS = 8
_BLOCK = 1 << 16
"""Columns (bytes) of one matrix product: 128 * 128 * 65536 < 2^31."""
_EXACT = 1 << 10
"""Columns whose sum float32 holds exactly: 128 * 128 * 1024 = 2^24. Its factors are exact in bfloat16, too."""
_AT_ONCE = 1 << 18
"""Bytes that are float32 at a time: they stay in a processor's cache."""


def box_sums(box: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """What a box of a tensor adds to the tensor's sums: int64 [8], on the box's device.

    Args:
        box: the elements, any dtype.
        start: the box's first element in the tensor.
        shape: of the whole tensor.
    """
    total_K = torch.zeros(SUMS, dtype=torch.int64, device=box.device)
    if box.numel() == 0:
        return total_K
    data = box.detach().contiguous()
    data = data.reshape(1) if data.ndim == 0 else data
    width, first = data.shape[-1] * data.element_size(), (start[-1] if start else 0) * data.element_size()
    rows_RC = data.view(torch.int8).reshape(-1, width)
    whole_width = (shape[-1] if shape else 1) * data.element_size()
    blocks = -(-whole_width // _BLOCK)
    rows = (tuple(start[:-1]), tuple(data.shape[:-1]), tuple(shape[:-1]))
    begin = 0
    while begin < width:
        block, place = divmod(first + begin, _BLOCK)
        end = min(width, begin + _BLOCK - place)
        dots_RK = _dots(rows_RC[:, begin:end], place)
        factors_R = _rows(*rows, blocks, block, box.device)
        total_K += (dots_RK.long() * factors_R[:, None]).sum(0)
        begin = end
    return total_K


def _dots(rows_RC: Tensor, place: int) -> Tensor:
    """The product of int8 rows with B from column `place` on: integers [R, K]."""
    if _int8_is_fast(rows_RC.device.type):
        with contextlib.suppress(RuntimeError):
            return _int8_dots(rows_RC, place)
    return _float_dots(rows_RC, place)


@functools.cache
def _int8_is_fast(device: str) -> bool:
    """On CPUs without the instructions for it, torch's int8 product is a loop: a hundred times slower for few rows."""
    return device != "cpu" or getattr(torch.cpu, "_is_vnni_supported", lambda: False)()


def _int8_dots(rows_RC: Tensor, place: int) -> Tensor:
    """cuBLAS wants 17 rows, columns in fours and aligned operands. Raises RuntimeError: this device can not do it."""
    count, width = rows_RC.shape
    more_rows, more_columns = max(0, 32 - count), -width % 16
    rows_RC = pad(rows_RC, (0, more_columns, 0, more_rows)).contiguous() if more_rows or more_columns else rows_RC
    columns_KC = pad(_columns(rows_RC.device)[:, place : place + width], (0, more_columns)).contiguous()
    return torch._int_mm(rows_RC.contiguous(), columns_KC.t())[:count]  # pyright: ignore[reportPrivateImportUsage]


def _float_dots(rows_RC: Tensor, place: int) -> Tensor:
    """The same numbers from float32 products of _EXACT columns each, of not too many rows at once."""
    width = rows_RC.shape[1]
    columns_KC = _float_columns(rows_RC.device)[:, place : place + width]
    even = width - width % _EXACT
    columns_BCK = columns_KC[:, :even].unflatten(1, (-1, _EXACT)).permute(1, 2, 0)
    found = []
    for part_RC in rows_RC.split(max(1, _AT_ONCE // width)):
        dots_RK = (part_RC[:, even:].float() @ columns_KC[:, even:].t()).long()
        if even:
            part_BRC = part_RC[:, :even].unflatten(1, (-1, _EXACT)).transpose(0, 1).float()
            dots_RK += torch.bmm(part_BRC, columns_BCK).long().sum(0)
        found.append(dots_RK)
    return torch.cat(found)


@functools.lru_cache(maxsize=8)
def _float_columns(device: torch.device) -> Tensor:
    return _columns(device).float()


@functools.lru_cache(maxsize=8)
def _columns(device: torch.device) -> Tensor:
    """B: int8 [8, 65536], odd."""
    places = torch.arange(SUMS * _BLOCK, dtype=torch.int64, device=device)
    return ((_mix(places) & 0xFF) - 128 | 1).to(torch.int8).reshape(SUMS, _BLOCK)


@functools.lru_cache(maxsize=256)
def _rows(
    start: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...], blocks: int, block: int, device: torch.device
) -> Tensor:
    """A: int64, odd, one for each row of the box."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for first, count, stride in zip(start, size, _strides(shape), strict=True):
        index = index[..., None] + (torch.arange(first, first + count, dtype=torch.int64, device=device) * stride)
    return _mix(index.reshape(-1) * blocks + block) | 1


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]


def _mix(numbers: Tensor) -> Tensor:
    """SplitMix64's mixing, int64. Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (2014)."""
    z = (numbers + 1) * -0x61C8864680B583EB
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shifted(z, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Right, zeros coming in."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
