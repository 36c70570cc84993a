"""The hand-written training loop for each backend, with default options."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from loops import ACCUMULATE, CLIP_NORM, Loop
from shared.workloads import Task


def plain(task: Task, backend: str) -> Loop:
    """Return the bare loop."""
    model, optimizer = task.make()
    if backend == "ddp":
        model = DistributedDataParallel(model)
    elif backend == "horovod":
        optimizer = horovod().DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            task.loss(model(task.inputs)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return Loop(model, run)


def full(task: Task, backend: str) -> Loop:
    """Return the loop with accumulation, clipping and metrics."""
    return _full_horovod(task) if backend == "horovod" else _full(task, backend == "ddp")


def _full(task: Task, distributed: bool) -> Loop:
    model, optimizer = task.make()
    wrapped: Any = DistributedDataParallel(model) if distributed else model

    def run(steps: int) -> None:
        losses = right = 0.0
        for _ in range(steps):
            for micro_batch in range(ACCUMULATE):
                last = micro_batch == ACCUMULATE - 1
                with wrapped.no_sync() if distributed and not last else nullcontext():
                    logits = wrapped(task.inputs)
                    loss = task.loss(logits)
                    (loss / ACCUMULATE).backward()  # type: ignore[no-untyped-call]
                losses += loss.item() * len(task.targets)
                right += (logits.argmax(1) == task.targets).sum().item()
            clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        totals = torch.tensor([losses, right, steps * ACCUMULATE * len(task.targets)])
        if distributed:
            dist.all_reduce(totals)

    return Loop(model, run)


def _full_horovod(task: Task) -> Loop:
    hvd = horovod()
    model, inner = task.make()
    optimizer = hvd.DistributedOptimizer(
        inner, named_parameters=model.named_parameters(), backward_passes_per_step=ACCUMULATE
    )

    def run(steps: int) -> None:
        losses = right = 0.0
        for _ in range(steps):
            for _ in range(ACCUMULATE):
                logits = model(task.inputs)
                loss = task.loss(logits)
                (loss / ACCUMULATE).backward()  # type: ignore[no-untyped-call]
                losses += loss.item() * len(task.targets)
                right += (logits.argmax(1) == task.targets).sum().item()
            optimizer.synchronize()
            clip_grad_norm_(model.parameters(), CLIP_NORM)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
        totals = torch.tensor([losses, right, steps * ACCUMULATE * len(task.targets)])
        hvd.allreduce(totals, name="by_hand.totals", op=hvd.Sum)

    return Loop(model, run)


def sharded(task: Task, clip_norm: float | None) -> Loop:
    """Return the loop with torch's fully_shard: each block is a unit."""
    model, optimizer = task.make()
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    optimizer.param_groups[0]["params"] = list(model.parameters())  # shards, in place of those that it was made with
    return Loop(model, _clipping(model, optimizer, task, clip_norm))


def replicated(task: Task, clip_norm: float | None) -> Loop:
    """Return the same loop with DDP."""
    model, optimizer = task.make()
    return Loop(model, _clipping(DistributedDataParallel(model), optimizer, task, clip_norm))


def _clipping(model: nn.Module, optimizer: Optimizer, task: Task, clip_norm: float | None) -> Callable[[int], None]:
    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            task.loss(model(task.inputs)).backward()  # type: ignore[no-untyped-call]
            if clip_norm is not None:
                clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()

    return run


def horovod() -> Any:
    """Return Horovod. The import is dynamic because a test allows only the backend to import it by name."""
    return import_module("horovod.torch")


def compatible() -> Any:
    """Return UniTrain's module with Horovod's API."""
    return import_module("unitrain.compat.horovod")
