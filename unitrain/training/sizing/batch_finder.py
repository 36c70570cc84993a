"""The batch finder: the largest micro-batch that fits into memory on every rank.

Every rank tries the same sizes with whole steps: forward, backward with accumulated gradients, and the optimizer. These
steps don't communicate, so a rank that runs out of memory leaves no other waiting; between them, the ranks tell each
other who did. What they change is put back.

What a training step has in memory and a trial would not comes first, or is added: buffers of the gradient averaging and
of the communication library (two steps at the smallest size do communicate), the previous batch and the next one, and a
margin. A size has to fit several times in a row, so that fragmentation shows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.data.loader import Loader
from unitrain.data.structure import rebuilt
from unitrain.errors import DataError, UsageError, listed
from unitrain.process import keep_no_memory, print_stdout
from unitrain.training.loop.backward import checked
from unitrain.training.loop.step import TrainingStep
from unitrain.training.models.compile import is_compiled
from unitrain.training.models.prepared import PreparedModules
from unitrain.training.sizing.out_of_memory import (
    at_most,
    free_memory,
    is_limited,
    is_out_of_memory,
    reason,
    release_cached_memory,
)
from unitrain.training.sizing.restoring import TrainingState

MARGIN = 0.05
"""Share of the memory that is free before the first trial, to be left free."""
_TRIAL_STEPS, _STEPS_IN_A_ROW = 2, 6


class BatchFinder:
    """Finds the largest micro-batch for a training. Made by ``strategy.find_micro_batch_size``.

    Args:
        communicator: the communicator of this process.
        step: the training step.
        prepared: the prepared modules.
        devices: all devices of this process.
        local_world_size: number of processes on this host.
        config: the settings.
        loader: the loader of the training.
        compute_loss: returns the loss of a batch.
        optimizers: the optimizers of the training.

    Raises:
        UsageError: the micro-batch size of this training can't be chosen.
    """

    def __init__(
        self,
        communicator: Communicator,
        step: TrainingStep,
        prepared: PreparedModules,
        devices: Sequence[torch.device],
        local_world_size: int,
        config: StrategyConfig,
        loader: Loader,
        compute_loss: Callable[[Any], Tensor],
        optimizers: Sequence[Optimizer],
    ) -> None:
        _check(config, loader, compute_loss, optimizers)
        if communicator.shards_parameters:
            raise UsageError(
                "find_micro_batch_size tries sizes on each rank alone, but the forward of a sharded model needs all "
                "ranks: set accumulate yourself."
            )
        self._communicator = communicator
        self._step = step
        self._devices = devices
        self._loader = loader
        self._compute_loss = compute_loss
        self._optimizers = optimizers
        self._averaged = communicator.world_size == 1  # the steps that communicate were made
        self._failures: dict[int, list[str]] = {}  # of each size that did not fit: what each rank said
        modules = [prepared.unwrap(module) for module in prepared]
        self._compiled = any(map(is_compiled, (*prepared, *modules)))
        self._state = TrainingState(modules, optimizers)
        gc.collect()
        release_cached_memory(devices)
        free = [free_memory(device, local_world_size) for device in devices]
        self._margins = [int(MARGIN * one) for one in free]
        self._host = free[0] if communicator.device.type == "cpu" else None
        if self._host is not None and is_limited():
            keep_no_memory()

    def find(self) -> int:
        """Return the largest size that fits on every rank, and set it in the loader. Collective.

        Raises:
            DataError: no size fits; on every rank.
        """
        global_batch, world_size = self._loader.global_batch_size, self._communicator.world_size
        assert global_batch is not None  # checked
        sizes = micro_batch_sizes(global_batch, world_size)
        fitting = sizes[: search(sizes, lambda size: self._fits(size, _TRIAL_STEPS)) + 1]
        self._compile_anew()
        while fitting and not self._fits(fitting[-1], _STEPS_IN_A_ROW):
            fitting.pop()
        if not fitting:
            raise DataError(
                f"a micro-batch of {min(self._failures)} sample does not fit into memory: "
                f"{self._who_failed(min(self._failures))}. Use activation_checkpointing, precision bf16, smaller "
                "samples or a smaller model."
            )
        size = fitting[-1]
        self._compile_anew()
        self._loader.split(size)
        if self._communicator.is_main:
            parts = -(-global_batch // (size * world_size))
            larger = min((failed for failed in self._failures if failed > size), default=None)
            print_stdout(
                f"unitrain: micro_batch_size {size}, accumulate {parts}, for a global batch of {global_batch}"
                + ("." if larger is None else f": {larger} samples did not fit on {self._who_failed(larger)}.")
            )
        return size

    def _compile_anew(self) -> None:
        """Drop what was compiled for several sizes, and would compute any size, but less efficiently."""
        if self._compiled:
            torch.compiler.reset()

    def _who_failed(self, size: int) -> str:
        said = self._failures[size]
        failed = [rank for rank, text in enumerate(said) if text]
        return f"rank {listed(failed)} ({said[failed[0]].rstrip('.')})"

    def _fits(self, size: int, steps: int) -> bool:
        """Return whether this many steps fit on every rank. Collective."""
        said = self._communicator.all_gather_data(self._tried(size, steps))
        if any(said):
            self._failures[size] = said
        elif not self._averaged:
            self._averaged = True
            self._allocate_communication(size)
        return not any(said)

    def _tried(self, size: int, steps: int) -> str:
        """Make steps without the other ranks. Return the error if memory runs out, else an empty string."""
        said = ""
        with self._state.restored():
            try:
                with nullcontext() if self._host is None else at_most(self._host):
                    self._make_steps(size, steps)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                said = reason(error)
        if said:
            gc.collect()  # what the failed step has left
        release_cached_memory(self._devices)
        return said

    def _allocate_communication(self, size: int) -> None:
        """Have the communication library allocate what it needs. Collective."""
        with self._state.restored():
            self._make_steps(size, 2, together=True)  # in the second one's forward, DDP rebuilds its buckets
        release_cached_memory(self._devices)

    def _make_steps(self, size: int, steps: int, *, together: bool = False) -> None:
        """Make steps without the other ranks, or with them and without accumulation."""
        samples = size * self._communicator.world_size
        margins = [
            torch.empty(margin, dtype=torch.uint8, device=device)
            for margin, device in zip(self._margins, self._devices, strict=True)
        ]
        batch = self._loader.first_batch(samples)
        around = [rebuilt(batch, lambda v: v.clone() if isinstance(v, Tensor) else v) for _ in range(2)]
        accumulates = samples < (self._loader.global_batch_size or 0)
        with ExitStack() as stack:
            # First, since it makes buckets, which keep the collective that they will call in training.
            windows = stack.enter_context(self._step.rehearsal(self._optimizers, averages=together))
            if not together:
                stack.enter_context(self._communicator.alone())
            for _ in range(steps):
                for _ in range(2 if accumulates and not together else 1):
                    checked(self._compute_loss(batch)).backward()  # type: ignore[no-untyped-call]
                for window in windows:
                    for finish in window.finishers if together else ():
                        finish(False)
                    window.optimizer.step()
                    window.clear()
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        del margins, around


def micro_batch_sizes(global_batch: int, world_size: int) -> list[int]:
    """Return the sizes per process, ascending, of the micro-batches into which a global batch can be split."""
    most = -(-global_batch // world_size)
    return sorted({-(-global_batch // (parts * world_size)) for parts in range(1, most + 1)})


def search(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Return the index of the largest size that fits, -1 if none does, trying sizes that about double, then between.

    The first one that is tried has two samples if there is one, since BatchNorm may need more than one row.
    """
    index = 1 if len(sizes) > 1 else 0
    largest, too_large = -1, len(sizes)
    while largest + 1 < too_large:
        if fits(sizes[index]):
            largest = index
        else:
            too_large = index
        if too_large < len(sizes):
            index = (largest + too_large) // 2
        else:
            doubled = (i for i, size in enumerate(sizes) if size >= 2 * sizes[largest])
            index = next(doubled, len(sizes) - 1)
    return largest


def _check(
    config: StrategyConfig, loader: Loader, compute_loss: Callable[[Any], Tensor], optimizers: Sequence[Optimizer]
) -> None:
    """Raise UsageError if the arguments are wrong, or the size can't be chosen."""
    if not isinstance(loader, Loader):
        raise UsageError(
            f"find_micro_batch_size takes a loader made by strategy.dataloader, not {type(loader).__name__}."
        )
    loader.check_splits()
    if not callable(compute_loss):
        raise UsageError(
            "find_micro_batch_size takes a function that returns the loss of a batch, not "
            f"{type(compute_loss).__name__}: pass lambda batch: criterion(model(batch[0]), batch[1]), say."
        )
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        raise UsageError("find_micro_batch_size takes a torch optimizer, or a non-empty list of them.")
    if config.accumulate > 1:
        raise UsageError(
            f"accumulate is {config.accumulate}, and find_micro_batch_size would choose it: leave it at 1."
        )
    if config.shares is not None:
        raise UsageError(
            "find_micro_batch_size does not support unequal shares: find the size in a run on the device with the "
            "largest share, and pass it as micro_batch_size."
        )
    if config.compression == "powersgd":
        raise UsageError(
            "find_micro_batch_size does not support compression powersgd, whose state trial steps would change: find "
            "the size in a run without it, and pass it as micro_batch_size."
        )
