"""How the process keeps its memory: for training and measuring, where tensors of one size come and go."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_memory() -> bool:
    """Let glibc keep freed memory instead of returning it; False where that cannot be set.

    A large tensor otherwise means fresh pages from the kernel at every step, each a page fault. To be called
    once, when a process starts to train or to measure.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # -1 is "never": the largest number that fits would still return what lies above 2 GB.
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
