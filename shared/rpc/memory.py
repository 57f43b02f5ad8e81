"""How a process keeps memory: the C library's, for bulk data, and Python's, for what is there to stay."""

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Lets glibc keep up to 128 MiB of freed memory for the next message instead of giving it back to the kernel.

    A stream of 1 MiB chunks otherwise pays page faults for every copy of every chunk: a third of its time
    (bench/data.py). Returns whether the C library took the settings; others than glibc have no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, 128 << 20)) and bool(mallopt(_M_MMAP_THRESHOLD, 32 << 20))


_settled = False


def settle() -> None:
    """The garbage collector does not look any more at what is alive now.

    It otherwise looks through all of torch, transformers and vLLM, several hundred thousand objects, every few
    generations: 0.3 to 0.5 s in which the process stands still (at 1B on an H200 a tenth of a generation).
    """
    global _settled
    gc.freeze()
    _settled = True


def unsettle() -> None:
    """It may be garbage from now on. What a parent froze before a fork stays shared, unless this process settled."""
    if _settled:
        gc.unfreeze()
