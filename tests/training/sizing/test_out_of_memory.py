"""Errors that mean that memory ran out are recognised, on a CPU as they really come, and no others."""

from __future__ import annotations

import errno
import mmap
import re
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from ranks import run_ranks
from torch._utils import ExceptionWrapper

import unitrain
from unitrain.training.sizing.out_of_memory import at_most, free_memory, is_out_of_memory, reason, release_cached_memory

CPU = torch.device("cpu")
HUGE = 2**58  # bytes; no process can map so much


def worker() -> None:
    """Fail as a DataLoader does when one of its workers has failed."""
    try:
        torch.empty(HUGE, dtype=torch.uint8)
    except RuntimeError:
        error = ExceptionWrapper(where="in DataLoader worker process 0")  # type: ignore[no-untyped-call]
    error.reraise()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "fails",
    [
        lambda: torch.empty(HUGE, dtype=torch.uint8),
        lambda: bytearray(HUGE),
        lambda: np.empty(HUGE, dtype=np.uint8),
        lambda: mmap.mmap(-1, HUGE),
        worker,
    ],
    ids=["torch", "python", "numpy", "mmap", "worker"],
)
def test_what_a_host_says(fails: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError, OSError)) as raised:
        fails()
    assert is_out_of_memory(raised.value)


# Without a GPU here: as they are reported.
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("FIND was unable to find an engine to execute this computation"),
        RuntimeError("std::bad_alloc"),
    ],
    ids=str,
)
def test_what_gpus_and_libraries_say(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyError("x"),
    ],
    ids=str,
)
def test_other_errors(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_the_reason_is_one_line_without_torch_s_source() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(HUGE, dtype=torch.uint8)
    assert re.match(rf"DefaultCPUAllocator: can't allocate memory: .* {HUGE} bytes", reason(raised.value))
    assert reason(MemoryError()) == "MemoryError"
    assert reason(RuntimeError("CUDA error: out of memory\nmore")) == "CUDA error: out of memory"


def limited() -> list[int]:
    found = [free_memory(CPU)]
    assert free_memory(CPU, processes=8) < found[0] / 4
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        used = (
            int(Path("/proc/self/statm").read_text().split()[0 if limit == resource.RLIMIT_AS else 5]) * mmap.PAGESIZE
        )
        resource.setrlimit(limit, (used + 300 * 2**20, -1))
        found.append(free_memory(CPU) // 2**20)
        block = torch.empty(200 * 2**20, dtype=torch.uint8)
        found.append(free_memory(CPU) // 2**20)
        del block
        resource.setrlimit(limit, (-1, -1))
    return found


def test_free_memory_is_what_a_limit_leaves() -> None:
    [[without, *found]] = run_ranks(limited, nprocs=1, fresh=True)
    assert without == pytest.approx(psutil.virtual_memory().available, rel=0.5)  # others use it meanwhile
    assert found == pytest.approx([300, 100, 300, 100], abs=5)


def capped() -> list[str]:
    said = []
    for limit in (-1, 2**45):
        resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
        with at_most(300 * 2**20):
            for megabytes in (200, 400):
                try:
                    torch.empty(megabytes * 2**20, dtype=torch.uint8)
                except RuntimeError as error:
                    said.append(f"{megabytes} {is_out_of_memory(error)}")
        assert resource.getrlimit(resource.RLIMIT_AS) == (limit, resource.RLIM_INFINITY)
    return said


def test_a_process_without_a_limit_can_be_given_one_for_a_while() -> None:
    assert run_ranks(capped, nprocs=1, fresh=True) == [["400 True"]]


def kept() -> list[float]:
    process = psutil.Process()
    unitrain.init(device="cpu").close()  # from now on, glibc keeps freed memory
    blocks = [torch.ones(2**20, dtype=torch.uint8) for _ in range(200)]
    resident = [process.memory_info().rss]
    blocks.clear()
    resident.append(process.memory_info().rss)
    release_cached_memory([CPU])
    resident.append(process.memory_info().rss)
    return [round((one - resident[0]) / 2**20) for one in resident]


def test_freed_memory_that_glibc_keeps_is_returned() -> None:
    assert run_ranks(kept, nprocs=1, fresh=True) == [pytest.approx([0, 0, -200], abs=20)]
