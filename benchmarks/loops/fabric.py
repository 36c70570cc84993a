"""The training loop with Lightning Fabric."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from loops import ACCUMULATE, CLIP_NORM, Loop
from shared.workloads import Task


def plain(task: Task, world_size: int) -> Loop:
    """Return the bare loop."""
    fabric = _fabric(world_size)
    model, optimizer = fabric.setup(*task.make())

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            fabric.backward(task.loss(model(task.inputs)))
            optimizer.step()

    return Loop(model, run)


def full(task: Task, world_size: int) -> Loop:
    """Return the loop with accumulation, clipping and metrics."""
    fabric = _fabric(world_size)
    model, optimizer = fabric.setup(*task.make())

    def run(steps: int) -> None:
        losses, right = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        rows = len(task.targets)
        for micro_batch in range(steps * ACCUMULATE):
            accumulating = (micro_batch + 1) % ACCUMULATE != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                logits = model(task.inputs)
                loss = task.loss(logits)
                fabric.backward(loss / ACCUMULATE)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()
            losses += loss.detach() * rows
            right += (logits.argmax(1) == task.targets).sum()
        fabric.all_reduce(torch.stack([losses, right, torch.tensor(steps * ACCUMULATE * rows)]), reduce_op="sum")

    return Loop(model, run)


def _fabric(world_size: int) -> Fabric:
    # Named, because Fabric's detection starts MPI, which aborts a process that mpirun has not launched.
    launched = TorchElasticEnvironment() if world_size > 1 else LightningEnvironment()
    strategy = "ddp" if world_size > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=[launched])
    fabric.launch()
    return fabric
