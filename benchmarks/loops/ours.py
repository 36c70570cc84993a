"""The training loop with UniTrain, on a strategy with the settings that the loop needs."""

from __future__ import annotations

from loops import ACCUMULATE, CLIP_NORM, Loop
from shared.workloads import Task
from unitrain import Strategy

FULL_SETTINGS = {"accumulate": ACCUMULATE, "clip_norm": CLIP_NORM}


def plain(task: Task, strategy: Strategy) -> Loop:
    """Return the bare loop."""
    model, optimizer = strategy.prepare(*task.make())

    def run(steps: int) -> None:
        for _ in range(steps):
            strategy.step(task.loss(model(task.inputs)), optimizer)

    return Loop(model, run)


def full(task: Task, strategy: Strategy) -> Loop:
    """Return the loop with accumulation, clipping and metrics, on a strategy with ``FULL_SETTINGS``."""
    model, optimizer = strategy.prepare(*task.make())

    def run(steps: int) -> None:
        losses, accuracy = strategy.meter(), strategy.meter()
        rows = len(task.targets)
        for _ in range(steps * ACCUMULATE):
            logits = model(task.inputs)
            loss = task.loss(logits)
            strategy.step(loss, optimizer)
            losses.add(mean=loss, count=rows)
            accuracy.add(total=(logits.argmax(1) == task.targets).sum(), count=rows)
        losses.value()
        accuracy.value()

    return Loop(model, run)
