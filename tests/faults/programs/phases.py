"""The program of ``test_kills.py``: trains a small model, and every part of it takes a while.

    python phases.py FOLDER EPOCHS

How long, each rank draws for itself. It notes the phase that it is in, so that the test can tell where a kill met it.
The only checkpoint is saved at the end.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from program import GLOBAL_BATCH, RANK, Noisy
from torch import Tensor, nn

import unitrain

_pauses = random.SystemRandom()


class Phases:
    """Notes the phase of this process in a file, and takes its time."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / f"{RANK}.phase", os.O_WRONLY | os.O_CREAT)
        self._most_s = float(os.environ.get("TESTS_PAUSE", "0"))
        self.enter("start")

    def enter(self, phase: str) -> None:
        self.note(phase)
        time.sleep(_pauses.uniform(0, self._most_s))

    def note(self, phase: str) -> None:
        os.pwrite(self._file, f"{phase:<16}".encode(), 0)


class Slow(Noisy):
    """Reading some of the samples takes time."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        if index % 4 == 0:
            self._phases.enter("loading")
        return super().__getitem__(index)


class Held(Noisy):
    """Without noise, which would be other noise in an evaluation that is done again."""

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        _, _, targets = super().__getitem__(index)
        return index, torch.stack([targets, targets**2, targets**3], 1)[0], targets


class SlowSGD(torch.optim.SGD):
    """Steps on one parameter after another."""

    def __init__(self, phases: Phases, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._phases = phases

    def step(self, closure: Any = None) -> Any:
        whole = self.param_groups[0]["params"]
        for parameter in whole:
            self.param_groups[0]["params"] = [parameter]
            super().step(closure)
            self._phases.enter("optimizer")
        self.param_groups[0]["params"] = whole


def main(folder: Path, epochs: int) -> None:
    phases = Phases(folder)
    strategy = unitrain.init(precision="fp64", accumulate=2, seed=7, sync_batchnorm=True)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 1))
    optimizer = SlowSGD(phases, model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    model, optimizer = strategy.prepare(model, optimizer)
    loader = strategy.dataloader(Slow(phases), global_batch_size=GLOBAL_BATCH, shuffle=True)
    evaluated = strategy.dataloader(Held(), global_batch_size=GLOBAL_BATCH)
    history: dict[str, Any] = {"losses": []}
    checkpoint = strategy.checkpoint(
        folder / "checkpoints",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        history=history,
    )
    checkpoint.resume()
    life = strategy.communicator.broadcast_object(time.time_ns())

    def backward(gradient: Tensor) -> None:
        phases.enter("backward")
        phases.note("averaging")  # in which it waits for the slowest rank

    with (folder / f"{life}.{strategy.global_step}.{strategy.rank}.notes").open("w") as notes:
        for epoch in loader.epochs(epochs):
            for ids, inputs, targets in loader:
                if len(ids):
                    note = {"epoch": epoch, "step": strategy.global_step, "ids": ids.tolist()}
                    notes.write(json.dumps(note) + "\n")
                    notes.flush()
                phases.enter("forward")
                outputs = model(inputs)  # waits for the others, too: BatchNorm is synchronised
                outputs.register_hook(backward)
                strategy.step(nn.functional.mse_loss(outputs, targets), optimizer, scheduler)
            phases.enter("between epochs")
            loss = strategy.meter()
            with strategy.evaluation(model):
                for ids, inputs, targets in evaluated:
                    phases.enter("evaluation")
                    loss.add(mean=nn.functional.mse_loss(model(inputs), targets), count=len(ids))
            history["losses"].append(loss.value())
    phases.enter("saving")
    checkpoint.save()
    strategy.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
