"""The training loop with PyTorch Ignite, the only other framework here that supports Horovod."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import ignite.distributed as idist
from ignite.engine import Engine, create_supervised_trainer
from ignite.metrics import Accuracy, Average
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from loops import ACCUMULATE, CLIP_NORM, Loop
from shared.workloads import Task


def plain(task: Task) -> Loop:
    """Return the bare loop."""
    model, optimizer = task.make()
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(optimizer)
    trainer = create_supervised_trainer(model, optimizer, lambda logits, _: task.loss(logits))
    return Loop(model, lambda steps: _epoch(trainer, task, steps))


def full(task: Task) -> Loop:
    """Return the loop with accumulation, clipping and metrics."""
    on_horovod = idist.backend() == "horovod"
    options = {"backward_passes_per_step": ACCUMULATE} if on_horovod else {}
    model, optimizer = task.make()
    wrapped: Any = idist.auto_model(model)
    stepped: Any = idist.auto_optim(optimizer, **options)
    on_ddp = isinstance(wrapped, DistributedDataParallel)

    def train(engine: Engine, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        last = engine.state.iteration % ACCUMULATE == 0
        with wrapped.no_sync() if on_ddp and not last else nullcontext():
            logits = wrapped(inputs)
            loss = task.loss(logits)
            (loss / ACCUMULATE).backward()  # type: ignore[no-untyped-call]
        if last:
            if on_horovod:
                stepped.synchronize()
            clip_grad_norm_(wrapped.parameters(), CLIP_NORM)
            with stepped.skip_synchronize() if on_horovod else nullcontext():
                stepped.step()
            stepped.zero_grad()
        return {"loss": loss.item(), "logits": logits, "targets": targets}

    trainer = Engine(train)
    Average(lambda output: output["loss"]).attach(trainer, "loss")
    Accuracy(lambda output: (output["logits"], output["targets"])).attach(trainer, "accuracy")
    return Loop(wrapped, lambda steps: _epoch(trainer, task, steps * ACCUMULATE))


def _epoch(trainer: Engine, task: Task, iterations: int) -> None:
    trainer.run([(task.inputs, task.targets)] * iterations, max_epochs=1)
