"""A run that is stopped between two epochs does what follows the loop over batches again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import unitrain
from unitrain import Stopped

EPOCHS = 4


def train(
    folder: Path, backend: str, stop_in: int | None, scheduler_first: bool, counted: bool
) -> tuple[list[float], list[tuple[int, float]], dict[str, Any]]:
    """Return the weights, each epoch's rate, and the best loss; a signal may come in an evaluation."""
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=30) as strategy:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(*torch.split(torch.randn(10, 4, generator=generator).double(), [3, 1], 1))
        train_loader = strategy.dataloader(data, global_batch_size=4, shuffle=True)
        test_loader = strategy.dataloader(data, global_batch_size=2)
        best: dict[str, Any] = {"loss": 1e9, "epochs": 0}
        checkpoint = strategy.checkpoint(
            folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=train_loader, best=best
        )
        checkpoint.resume()
        rates = []
        for epoch in train_loader.epochs(EPOCHS) if counted else range(train_loader.epoch, EPOCHS):
            for inputs, targets in train_loader:
                strategy.step(mse_loss(model(inputs), targets), optimizer)
            if scheduler_first:
                scheduler.step()
            losses = strategy.meter()
            with strategy.evaluation(model):
                for number, (inputs, targets) in enumerate(test_loader):
                    losses.add(mean=mse_loss(model(inputs), targets), count=len(targets))
                    if epoch == stop_in and number == 1 and strategy.is_main:
                        os.kill(os.getpid(), signal.SIGTERM)
                        time.sleep(1)  # until the watch has seen it: the next boundary is the next batch
            best.update(loss=min(best["loss"], losses.value()), epochs=best["epochs"] + 1)
            if not scheduler_first:
                scheduler.step()
            rates.append((epoch, float(scheduler.get_last_lr()[0])))
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), rates, best


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.parametrize("stop_in", [0, EPOCHS - 1])
def test_what_follows_the_loop_is_done_again(
    tmp_path: Path, stop_in: int, scheduler_first: bool, counted: bool
) -> None:
    weights, rates, best = train(tmp_path / "whole", "single", None, scheduler_first, counted)
    with pytest.raises(Stopped):
        train(tmp_path / "parts", "single", stop_in, scheduler_first, counted)
    again = train(tmp_path / "parts", "single", None, scheduler_first, counted)
    assert again[0] == weights
    assert again[1] == rates[stop_in:]
    assert again[2] == best


def test_on_several_ranks(tmp_path: Path) -> None:
    whole = run_ranks(train, tmp_path / "whole", "ddp", None, True, True)
    with pytest.raises(Stopped):
        run_ranks(train, tmp_path / "parts", "ddp", 1, True, True)
    again = run_ranks(train, tmp_path / "parts", "ddp", None, True, True)
    for before, after in zip(whole, again, strict=True):
        assert after[0] == before[0]
        assert after[1] == before[1][-len(after[1]) :], "the ranks may stop at the next epoch's first batch"
