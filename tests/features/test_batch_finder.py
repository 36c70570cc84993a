"""The size that is found fits on every rank, and nothing is left of the attempts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from needs import GPU, HOROVOD
from ranks import on_ranks, run_ranks
from torch import nn
from torch._utils import ExceptionWrapper

import unitrain
from unitrain import DataError, UsageError, rng
from unitrain.features.batch_finder.find_micro_batch_size import find_micro_batch_size, is_out_of_memory

MB = 2**20


def out_of_memory() -> None:
    """Run out of memory as torch does on a host."""
    torch.empty(2**60)


def find(backend: str, most: list[int]) -> list[Any]:
    """Find a size when ranks run out of memory in the middle of their step. Return it, and what is left of attempts."""
    with unitrain.init(backend=backend, device="cpu", timeout_s=20, debug=True) as strategy:
        model = nn.Linear(4, 2)
        sizes: list[int] = []

        def attempt(size: int) -> None:
            sizes.append(size)
            model.register_buffer("large", torch.rand(size))
            if size > most[strategy.rank]:
                out_of_memory()

        drawn = rng.capture()
        size = find_micro_batch_size(strategy, attempt, 10)
        assert torch.equal(torch.get_rng_state(), drawn["torch"])
        strategy.prepare(model)
        return [size, sizes, strategy.gather([strategy.rank])]


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=HOROVOD)])
def test_the_rank_with_the_least_memory_decides_and_leaves_no_other_waiting(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run_ranks(find, backend, [10, 4])
    assert first == second == [3, [10, 5, 3], [0, 1]]
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unitrain: micro_batch_size")]
    assert "micro_batch_size 3: 5 samples did not fit on rank 1 (RuntimeError: " in line


@on_ranks()
def test_what_does_not_fit_or_is_wrong_is_an_error_on_every_rank() -> None:
    with unitrain.init(backend="ddp", device="cpu", timeout_s=20) as strategy:

        def fails_on_rank_1(size: int) -> None:
            if strategy.rank == 1:
                out_of_memory()

        too_large = r"a micro-batch of 1 sample does not fit into memory: 1 samples did not fit on rank 1 \("
        alone = "gather was called in an attempt of find_micro_batch_size, which each rank makes alone"
        attempts: list[tuple[Callable[[int], object], int, type[Exception], str]] = [
            (fails_on_rank_1, 8, DataError, too_large),
            (lambda size: strategy.gather([size]), 8, UsageError, alone),
            (lambda size: None, 0, UsageError, "largest is 0, but must be at least 1"),
            (lambda size: torch.ones(2) @ torch.ones(3), 8, RuntimeError, "inconsistent tensor size"),
        ]
        for attempt, largest, error, said in attempts:
            with pytest.raises(error, match=said):
                find_micro_batch_size(strategy, attempt, largest)
        assert strategy.gather([strategy.rank]) == [0, 1]
        strategy.prepare(nn.Linear(2, 2))
        with pytest.raises(UsageError, match=r"call it before strategy\.prepare"):
            find_micro_batch_size(strategy, lambda size: None, 8)


def test_what_an_attempt_has_allocated_is_freed_before_the_next() -> None:
    alive: list[int] = []

    class Large(nn.Module):
        """Counts its instances."""

        def __init__(self) -> None:
            super().__init__()
            self.itself = [self]  # a cycle, as in models

    def attempt(size: int) -> None:
        gc.disable()  # the finder collects
        alive.append(sum(type(one) is Large for one in gc.get_objects()))
        large = Large()
        if size > 2:
            out_of_memory()
        del large

    try:
        with unitrain.init(backend="single", device="cpu") as strategy:
            assert find_micro_batch_size(strategy, attempt, 8) == 2
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


@pytest.mark.gpu
@GPU
def test_a_gpu() -> None:
    with unitrain.init(backend="single", device="cuda") as strategy:
        part = torch.cuda.mem_get_info()[0] // 16

        def attempt(size: int) -> None:
            torch.empty(size * part, dtype=torch.uint8, device="cuda")

        assert find_micro_batch_size(strategy, attempt, 22) == 11
        assert torch.cuda.memory_reserved() < 100 * MB


HUGE = 2**58  # bytes; no process can map so much


def in_a_worker() -> None:
    """Fail as a DataLoader does when one of its workers has failed."""
    try:
        torch.empty(HUGE, dtype=torch.uint8)
    except RuntimeError:
        error = ExceptionWrapper(where="in DataLoader worker process 0")  # type: ignore[no-untyped-call]
    error.reraise()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "fails",
    [
        out_of_memory,
        lambda: bytearray(HUGE),
        lambda: np.empty(HUGE, np.uint8),
        in_a_worker,
    ],
    ids=["torch", "python", "numpy", "worker"],
)
def test_what_a_host_says(fails: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        fails()
    assert is_out_of_memory(raised.value)


# Those of GPUs as they are reported: there is none here.
@pytest.mark.parametrize(
    ("error", "no_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("FIND was unable to find an engine to execute this computation"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_what_gpus_and_libraries_say(error: Exception, no_memory: bool) -> None:
    assert is_out_of_memory(error) == no_memory
