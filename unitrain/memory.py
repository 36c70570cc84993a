"""How this process's memory is given back to the system: not with every step."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGEST_FROM_HEAP = 32 * 2**20  # as large as glibc lets it be


def keep_memory() -> None:
    """Let glibc keep what is freed, so that the next step finds it there.

    Gradients are dropped at the end of a step, when activations are gone too, and glibc then gives the top of its heap
    back to the system: the next step had to fault in thousands of pages, which took a fifth of a small ResNet's time.
    Blocks of more than 32 MiB still go back. Elsewhere than under glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
