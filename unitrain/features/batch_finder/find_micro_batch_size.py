"""Finds the largest micro-batch that fits: attempts that each rank makes alone, and on which all ranks agree.

A rank that runs out of memory within a collective would leave the others waiting. So an attempt has no collectives, and
comes before ``strategy.prepare``. After each, the ranks tell each other who ran out of memory.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable

import torch

import unitrain
from unitrain import rng
from unitrain.device import accelerator
from unitrain.errors import DataError, UsageError, listed
from unitrain.process import print_stdout

# Share of a GPU's free memory that attempts leave free: for buckets of gradients, buffers of the communication library,
# and fragmentation.
_MARGIN = 0.05
# What torch, CUDA's libraries and C++ say. Without memory for its workspace, cuDNN finds no engine.
_MESSAGES = re.compile(
    r"out of memory|can't allocate memory|bad_alloc|STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INIT"
    r"|unable to find an engine to execute",
    re.IGNORECASE,
)


def find_micro_batch_size(strategy: unitrain.Strategy, attempt: Callable[[int], object], largest: int) -> int:
    """Halve a size until ``attempt(size)`` runs out of memory on no rank, and return it. Collective.

    Call it before ``strategy.prepare``, and pass the result to ``strategy.dataloader`` as ``micro_batch_size``. Random
    numbers are drawn afterwards as if it had not been called.

    Args:
        strategy: the strategy of the run.
        attempt: makes one or two steps as in training, on copies of the plain models and with its own optimizers, on a
            batch of this many samples, the largest that the data have. It must call no collective: each rank runs it
            alone. What it has allocated is freed afterwards.
        largest: the size to begin with, such as each rank's part of the global batch.

    Raises:
        DataError: not even one sample fits; on every rank.
        UsageError: ``largest`` is less than 1; a module was prepared; or ``attempt`` calls a collective.

    Example:
        >>> def attempt(size):
        ...     net = copy.deepcopy(model).to(strategy.device)
        ...     optimizer = torch.optim.Adam(net.parameters())
        ...     for _ in range(2):
        ...         net(torch.zeros(size, 3, 224, 224, device=strategy.device)).sum().backward()
        ...         optimizer.step()
        >>> size = find_micro_batch_size(strategy, attempt, 256 // strategy.world_size)
    """
    if largest < 1:
        raise UsageError(f"find_micro_batch_size: largest is {largest}, but must be at least 1.")
    if strategy._prepared.count:
        raise UsageError("find_micro_batch_size makes attempts on plain modules: call it before strategy.prepare.")
    alone = "in an attempt of find_micro_batch_size, which each rank makes alone: compute the loss without it."
    size, parts, reason = largest, 1, ""
    while True:
        generators = rng.capture()
        with strategy.communicator.collectives.refused(alone):
            error = _out_of_memory(strategy._backend.devices, attempt, size)
        rng.restore(generators)
        errors = strategy.communicator.all_gather_object(error)
        failed = [rank for rank, said in enumerate(errors) if said]
        if not failed:
            break
        reason = f"{size} samples did not fit on rank {listed(failed)} ({errors[failed[0]]})"
        if size == 1:
            raise DataError(
                f"a micro-batch of 1 sample does not fit into memory: {reason}. Use activation_checkpointing, "
                "precision bf16, smaller samples or a smaller model."
            )
        parts *= 2
        size = -(-largest // parts)
    if strategy.is_main:
        print_stdout(f"unitrain: micro_batch_size {size}: {reason or 'the largest size fits'}.")
    return size


def _out_of_memory(devices: tuple[torch.device, ...], attempt: Callable[[int], object], size: int) -> str:
    """Make an attempt, and return the message of the error if it runs out of memory, else an empty string."""
    gpus = [device for device in devices if device.type == accelerator()]
    margins = []
    for gpu in gpus:
        free, _ = torch.get_device_module(gpu).mem_get_info(gpu)
        margins.append(torch.empty(int(_MARGIN * free), dtype=torch.uint8, device=gpu))
    message = ""
    try:
        attempt(size)
        # The host runs ahead: an error of a kernel is raised only here.
        for gpu in gpus:
            torch.accelerator.synchronize(gpu)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
    del margins
    gc.collect()  # the error's traceback had the attempt's tensors
    if gpus:
        torch.accelerator.empty_cache()
    return message


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory could not be allocated, on a GPU or on the host."""
    # torch.OutOfMemoryError is a RuntimeError, too.
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error))))
