"""Trials: runs within a run, each the same alone and after others, resumed on any number of ranks."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import FSDP, HOROVOD
from ranks import on_ranks, run_ranks
from torch import nn

import unitrain
from unitrain import UsageError
from unitrain.features.ema import EMA

DATA = torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EPOCHS = 3


def start(backend: str, **settings: Any) -> unitrain.Strategy:
    return unitrain.init(backend=backend, device="cpu", precision="fp64", timeout_s=30, **{"seed": 5, **settings})


class Killed(Exception):
    """Raised in place of a kill."""


def fold(strategy: unitrain.Strategy, number: int, folder: Path | None = None, *, killed_at: int = -1) -> list[float]:
    """Train a fold, with checkpoints if there is a folder. Return its weights and score, and its last step."""
    held = torch.arange(24) % 3 == number
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    train = strategy.dataloader(DATA[~held], global_batch_size=4, shuffle=True)
    ema, scores = strategy.add(EMA(model, decay=0.5)), {"score": 0.0}
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train": train}
    if folder is not None:
        saved = strategy.checkpoint(folder / str(number), ema=ema, scores=scores, **objects)
        saved.resume()
    for _ in train.epochs(EPOCHS):
        for batch in train:
            if strategy.global_step == killed_at:
                raise Killed
            strategy.step((model(batch) - batch.sum(1, keepdim=True).sin()).square().mean(), optimizer, scheduler)
        with strategy.evaluation(ema):
            rows = [strategy.gather(model(batch)) for batch in strategy.dataloader(DATA[held], batch_size=4)]
        scores["score"] = float(torch.cat(rows).square().mean())
        if folder is not None:
            saved.save()
    whole = [strategy.full_tensor(p.detach()).flatten() for p in model.parameters()]
    return [*torch.cat(whole).tolist(), scores["score"], strategy.global_step]


def folds(backend: str, numbers: list[int], folder: Path | None = None, *, killed_at: int = -1, **settings: Any) -> Any:
    results = []
    with start(backend, **settings) as strategy:
        drawn = float(torch.rand(()))
        torch.manual_seed(3)
        for number in numbers:
            with strategy.trial(f"fold-{number}") as trial:
                assert (strategy.global_step, strategy.config.seed) == (0, trial.seed)
                results.append(fold(strategy, number, folder, killed_at=killed_at if number == 1 else -1))
            assert (strategy.global_step, strategy.config.seed) == (0, 5)
        after = float(torch.rand(()))
        torch.manual_seed(3)
        assert after == float(torch.rand(())) != drawn
    return results


def test_smoke(tmp_path: Path) -> None:
    every = folds("single", [0, 1, 2])
    assert folds("single", [1]) == every[1:2]
    assert len({result[0] for result in every}) == 3
    with pytest.raises(Killed):
        folds("single", [0, 1, 2], tmp_path, killed_at=6)
    assert folds("single", [0, 1, 2], tmp_path) == every
