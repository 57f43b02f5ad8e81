"""The torch twin of blocks: ragged columns to padded tensors and back."""

import numpy as np
import torch
from torch import Tensor

from shared.batch.block import Ragged


def padded(ragged: Ragged, pad: float = 0, width: int | None = None) -> Tensor:
    """Rows side by side, padded on the right.

    Args:
        ragged: int32, float32 or uint8 column.
        pad: the padding element.
        width: T; default: the longest row. A longer row is a ValueError.

    Returns:
        [B, T]: int32 becomes int64 (torch indexes with it); float32 and uint8 stay.
    """
    longest = int(ragged.lengths.max(initial=0))
    if width is not None and longest > width:
        raise ValueError(f"a row of {longest} elements does not fit into {width}")
    out = np.full((len(ragged), longest if width is None else width), pad, _wide(ragged))
    out[_inside(ragged.lengths, out.shape[1])] = ragged.data
    return torch.from_numpy(out)


def padding_mask(ragged: Ragged, width: int | None = None) -> Tensor:
    """[B, T] bool: where `padded` has elements of the row."""
    width = int(ragged.lengths.max(initial=0)) if width is None else width
    return torch.from_numpy(_inside(ragged.lengths, width))


def scalars(ragged: Ragged) -> Tensor:
    """[B]: the only element of each row; a ValueError when a row has not exactly one."""
    return torch.from_numpy(ragged.scalars().astype(_wide(ragged)))


def lengths(ragged: Ragged) -> Tensor:
    """[B] int64: elements of each row."""
    return torch.from_numpy(ragged.lengths.astype(np.int64))


def ragged_from_padded(t_BT: Tensor, lengths_B: Tensor | np.ndarray) -> Ragged:
    """The first lengths[i] elements of each row i.

    Args:
        t_BT: any device; integers become int32, floats float32, bool and uint8 uint8.
        lengths_B: [B] integers, at most T.
    """
    lengths_array = lengths_B.cpu().numpy() if isinstance(lengths_B, Tensor) else lengths_B
    if t_BT.ndim != 2 or lengths_array.shape != (t_BT.shape[0],):
        raise ValueError(f"[B, T] and [B] expected, not {tuple(t_BT.shape)} and {lengths_array.shape}")
    if lengths_array.size and not 0 <= lengths_array.min() <= lengths_array.max() <= t_BT.shape[1]:
        raise ValueError(f"lengths {lengths_array.min()}..{lengths_array.max()} do not fit into T={t_BT.shape[1]}")
    narrow = _narrow(t_BT).cpu().numpy()
    return Ragged(narrow[_inside(lengths_array, narrow.shape[1])], lengths_array.astype(np.uint32))


def ragged_from_scalars(t_B: Tensor) -> Ragged:
    """One element per row."""
    return ragged_from_padded(t_B.reshape(-1, 1), torch.ones(t_B.numel(), dtype=torch.int64))


def _inside(lengths_array: np.ndarray, width: int) -> np.ndarray:
    return np.arange(width)[None, :] < lengths_array.astype(np.int64)[:, None]


def _wide(ragged: Ragged) -> np.dtype:
    return np.dtype(np.int64) if ragged.data.dtype == np.int32 else ragged.data.dtype


def _narrow(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.dtype in (torch.bool, torch.uint8):
        return tensor.to(torch.uint8)
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int32)
