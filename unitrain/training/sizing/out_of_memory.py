"""Running out of memory: which errors mean it, how much is free, and how to get an error instead of being killed."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
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


def release_cached_memory(devices: Iterable[torch.device]) -> None:
    """Give back the memory that torch and glibc keep for later use."""
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()
    return_memory()


def free_memory(device: torch.device, processes: int = 1) -> int:
    """Return how many bytes this process can still allocate.

    Args:
        device: the GPU; or the CPU, for memory of the host.
        processes: number of processes that share the host.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = torch.cuda.get_per_process_memory_fraction(device)
        return max(0, min(free, int(share * total) - torch.cuda.memory_reserved(device)))
    used = _used()
    left = [most - used[name] for limit, name in _LIMITS if (most := resource.getrlimit(limit)[0]) >= 0]
    return max(0, min([psutil.virtual_memory().available // processes, *left]))


def is_limited() -> bool:
    """Return whether the memory of this process is limited (``ulimit -v`` or ``-d``)."""
    return any(resource.getrlimit(limit)[0] >= 0 for limit, _ in _LIMITS)


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Context manager in which this process can allocate so many bytes on the host, and gets an error beyond.

    Without a limit, the kernel kills a process when the host has no more. Processes with a limit keep their own.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if not is_limited():
        resource.setrlimit(resource.RLIMIT_AS, (_used()["VmSize"] + size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _used() -> dict[str, int]:
    """Return the bytes that count towards each limit."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: int(line.split()[1]) * 1024 for line in lines for _, name in _LIMITS if line.startswith(f"{name}:")}
