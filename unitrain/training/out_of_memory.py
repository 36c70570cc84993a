"""Running out of memory: which errors mean it, how much memory is free, and how to give back what is kept."""

from __future__ import annotations

import errno
import gc
import re
import resource
from collections.abc import Iterable
from pathlib import Path

import torch

from unitrain.process import return_memory

# What torch, CUDA's libraries, C++ and the kernel say. Without memory for its workspace, cuDNN finds no engine.
_MESSAGES = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|bad_alloc|STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INIT"
    r"|unable to find an engine to execute",
    re.IGNORECASE,
)
# A limit of this process, and the line of /proc/self/status that counts towards it.
_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory could not be allocated, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))


def reason(error: BaseException) -> str:
    """Return the first line of such an error, without the place in torch's source."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[enforce fail at .*? == 0\. ", "", line) or type(error).__name__


def release_memory(devices: Iterable[torch.device]) -> None:
    """Give back the memory that Python, torch and glibc keep for later use."""
    gc.collect()
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()
    return_memory()


def free_memory(device: torch.device) -> int:
    """Return how many bytes this process can still allocate; 0 on a CPU if it has no limit."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = torch.cuda.get_per_process_memory_fraction(device)
        return max(0, min(free, int(share * total) - torch.cuda.memory_reserved(device)))
    sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limits = [(resource.getrlimit(limit)[0], sizes[name]) for limit, name in _LIMITS]
    return max(0, min((most - int(used.split()[0]) * 1024 for most, used in limits if most >= 0), default=0))
