"""Where and how a role computes: device, threads, determinism, precision."""

import contextlib
import ctypes
import functools
import gc
import os
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

P = ParamSpec("P")
T = TypeVar("T")
_of_rank: int | None = None


def take_gpu(index: int) -> None:
    """Makes a GPU this rank's own, for all that is computed here (`on_own_gpu`)."""
    global _of_rank
    _of_rank = index
    torch.cuda.set_device(index)


def on_own_gpu(function: Callable[P, T]) -> Callable[P, T]:
    """The function with this rank's GPU as the present one: a thread begins on the first, whatever others do."""

    @functools.wraps(function)
    def there(*args: P.args, **kwargs: P.kwargs) -> T:
        if _of_rank is not None:
            torch.cuda.set_device(_of_rank)
        return function(*args, **kwargs)

    return there


def prepare(threads: int) -> None:
    """Sets up this process once, before any model is loaded.

    Sums depend on how many threads share them, so the thread count is part of what makes a run repeatable.

    Args:
        threads: CPU threads of one operator; 0: one per core this process may use.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would also fill every new tensor, a fifteenth of an update, to expose reads of what was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    # Standard error carries JSON logs.
    disable_progress_bar()


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is CUDA where there is one, else the CPU.

    Raises:
        ValueError: the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"model.device: {name!r} is not a device; use auto, cpu or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"model.device: {name!r} is not here: this machine has {torch.cuda.device_count()} CUDA devices"
        )
    return device


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Computes in `dtype` while parameters stay as they are; a no-op for float32 and float64."""
    if dtype in (torch.float32, torch.float64):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def free_memory() -> None:
    """Returns what is no longer referenced to the device and the operating system.

    A service outlives its runs; glibc alone would keep a model's worth of small freed blocks.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    free_pinned()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def free_pinned() -> None:
    """Returns page-locked main memory that nobody holds: torch keeps it, in powers of two."""
    if torch.cuda.is_available() and (empty := getattr(torch._C, "_host_emptyCache", None)):
        empty()


def wait_for_copies(tensors: Iterable[Tensor]) -> None:
    """Waits for what is on its way from or to the GPUs that these tensors are on."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
