"""The training loop with Hugging Face's Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

from loops import ACCUMULATE, CLIP_NORM, Loop
from shared.workloads import Task


def plain(task: Task) -> Loop:
    """Return the bare loop."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*task.make())

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            accelerator.backward(task.loss(model(task.inputs)))
            optimizer.step()

    return Loop(model, run)


def full(task: Task) -> Loop:
    """Return the loop with accumulation, clipping and metrics."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model, optimizer = accelerator.prepare(*task.make())

    def run(steps: int) -> None:
        losses, right = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        rows = len(task.targets)
        for _ in range(steps * ACCUMULATE):
            with accelerator.accumulate(model):
                logits = model(task.inputs)
                loss = task.loss(logits)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()
            losses += loss.detach() * rows
            right += (logits.argmax(1) == task.targets).sum()
        accelerator.reduce(torch.stack([losses, right, torch.tensor(steps * ACCUMULATE * rows)]))

    return Loop(model, run)


def sharded(task: Task, block: str, clip_norm: float | None) -> Loop:
    """Return the loop with FSDP2: each module of the class ``block`` is a unit.

    Accelerate leaves FSDP to GPUs, but what it does with it runs on CPUs as well, once it has been told.
    """
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[block]
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    model, optimizer = accelerator.prepare(*task.make())
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            accelerator.backward(task.loss(model(task.inputs)))
            if clip_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()

    return Loop(model, run)
