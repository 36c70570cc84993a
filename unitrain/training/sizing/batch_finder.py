"""The batch finder: halves the micro-batch until it fits into memory on every rank.

A rank that runs out of memory within a collective would leave the others waiting. So a trial is made of forwards and
backwards on each rank alone, without averaging gradients. After each, the ranks tell each other who ran out of memory.
"""

from __future__ import annotations

import errno
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.data.loader import Loader
from unitrain.errors import DataError, UsageError, listed
from unitrain.process import print_stdout
from unitrain.training.batch_norm import layers as batch_norm
from unitrain.training.loop.step import TrainingStep
from unitrain.training.loop.weights import checked
from unitrain.training.models.compile import is_compiled
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.training_state import TrainingState

# Share of a GPU's free memory that trials leave free: for buffers of the communication library, and fragmentation.
_MARGIN = 0.05
_ALONE = (
    "in a trial of find_micro_batch_size, which each rank makes alone. A loss of the samples of all ranks would depend "
    "on how a batch is split: choose micro_batch_size yourself."
)
# What torch, CUDA's libraries and C++ say. Without memory for its workspace, cuDNN finds no engine.
_MESSAGES = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|bad_alloc|STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INIT"
    r"|unable to find an engine to execute",
    re.IGNORECASE,
)


@contextmanager
def _trial(step: TrainingStep, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Context manager for backwards and optimizer steps of this rank alone, which don't average gradients."""
    if step.windows.any_open:
        raise UsageError("gradients have been accumulated: call this before the loop, or between two steps.")
    windows = step.windows.of(optimizers)
    armed, is_stand_in = getattr(step.averaging, "armed", False), step.batches.current_batch.is_stand_in
    step.averaging.expect(False)
    step.batches.current_batch.is_stand_in = False
    step.batches.in_trial = True
    if step.checks.direct is not None:
        step.checks.direct.allowed = True
    try:
        yield
    finally:
        step.batches.in_trial = False
        if step.checks.direct is not None:
            step.checks.direct.allowed = False
        for window in windows:
            window.clear()
            for failed in step.hooks.after_error:
                failed(window.optimizer)
        step.averaging.expect(armed)
        step.batches.current_batch.is_stand_in = is_stand_in


class BatchFinder:
    """Finds a micro-batch for a training that fits. Made by ``strategy.find_micro_batch_size``."""

    def __init__(
        self,
        communicator: Communicator,
        step: TrainingStep,
        prepared: PreparedModules,
        gpus: Sequence[torch.device],
        config: StrategyConfig,
        loader: Loader,
        compute_loss: Callable[[Any], Tensor],
        optimizers: Sequence[Optimizer],
    ) -> None:
        _check(communicator, config, loader, compute_loss, optimizers)
        self._communicator = communicator
        self._step = step
        self._modules = [prepared.unwrap(module) for module in prepared]
        self._compiled = any(map(is_compiled, (*prepared, *self._modules)))
        self._gpus = gpus
        self._loader = loader
        self._compute_loss = compute_loss
        self._optimizers = optimizers
        self._state = TrainingState(self._modules, optimizers)

    def find(self) -> int:
        """Return the largest size that fits on every rank, and set it in the loader. Collective."""
        global_batch, world_size = self._loader.global_batch_size, self._communicator.world_size
        assert global_batch is not None  # checked
        parts, why = 1, ""
        while failure := self._tried(size := -(-global_batch // (parts * world_size)), accumulates=parts > 1):
            if size == 1:
                raise DataError(
                    f"a micro-batch of 1 sample does not fit into memory: {failure}. Use activation_checkpointing, "
                    "precision bf16, smaller samples or a smaller model."
                )
            parts, why = 2 * parts, f": {size} samples did not fit on {failure}"
        if why and self._compiled:
            torch.compiler.reset()  # what was compiled for several sizes computes any size, but less efficiently
        self._loader.split(size)
        if self._communicator.is_main:
            parts = -(-global_batch // (size * world_size))
            print_stdout(
                f"unitrain: micro_batch_size {size}, accumulate {parts}, for a global batch of {global_batch}{why}."
            )
        return size

    def _tried(self, size: int, *, accumulates: bool) -> str:
        """Return which ranks run out of memory in steps of this size, and an error; "" if none does. Collective."""
        failure = ""
        with self._state.restored(), _trial(self._step, self._optimizers):
            margins = [
                torch.empty(int(_MARGIN * _free_memory(gpu)), dtype=torch.uint8, device=gpu) for gpu in self._gpus
            ]
            # The second round has the optimizer's state in memory, and the third gradients to add to.
            for part in (self._backward, self._update, self._backward, *[self._backward] * accumulates):
                errors = self._communicator.all_gather_data(self._error_of(part, size))
                failed = [rank for rank, error in enumerate(errors) if error]
                if failed:
                    failure = f"rank {listed(failed)} ({errors[failed[0]].rstrip('.')})"
                    break
            del margins
        gc.collect()
        if self._gpus:
            torch.accelerator.empty_cache()
        return failure

    def _error_of(self, part: Callable[[int], None], size: int) -> str:
        """Return the message of the error if a part of a trial runs out of memory, else an empty string."""
        try:
            part(size)
        except Exception as error:
            # Ranks that share an optimizer's state wait for this one, and smaller batches would not help.
            if not is_out_of_memory(error) or (part == self._update and self._communicator.sharding.any):
                raise
            return reason(error)
        return ""

    def _backward(self, size: int) -> None:
        """Run a forward and a backward on this rank alone, with three batches in memory as in training."""
        batches = [self._loader.first_batch(size * self._communicator.world_size) for _ in range(3)]
        with self._communicator.collectives.refused(_ALONE), batch_norm.local_statistics(self._modules):
            checked(self._compute_loss(batches[0])).backward()  # type: ignore[no-untyped-call]
        for gpu in self._gpus:
            torch.accelerator.synchronize(gpu)

    def _update(self, size: int) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _free_memory(gpu: torch.device) -> int:
    """Return the free bytes of a GPU's memory; 0 if its module does not tell, as that of MPS."""
    ask = getattr(torch.get_device_module(gpu), "mem_get_info", None)
    return int(ask(gpu)[0]) if ask is not None else 0


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


def _check(
    communicator: Communicator,
    config: StrategyConfig,
    loader: Loader,
    compute_loss: Callable[[Any], Tensor],
    optimizers: Sequence[Optimizer],
) -> None:
    """Raise UsageError if the arguments are wrong, or the size can't be chosen."""
    if not isinstance(loader, Loader):
        raise UsageError(
            f"find_micro_batch_size takes a loader made by strategy.dataloader, not {type(loader).__name__}."
        )
    loader.check_splits()
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        raise UsageError("find_micro_batch_size takes a torch optimizer, or a non-empty list of them.")
    if communicator.sharding.of_parameters:
        raise UsageError(
            "find_micro_batch_size tries sizes on each rank alone, but a sharded model needs all: set accumulate."
        )
    if config.accumulate > 1:
        raise UsageError(
            f"accumulate is {config.accumulate}, and find_micro_batch_size would choose it: leave it at 1."
        )
    if config.shares is not None:
        raise UsageError(
            "find_micro_batch_size does not support unequal shares: find it on the device with the largest share."
        )
