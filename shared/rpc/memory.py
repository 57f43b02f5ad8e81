"""How the C library keeps memory in a process that moves bulk data."""

import ctypes

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
