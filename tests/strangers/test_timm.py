"""timm's training loop, ported as docs/migrating/moving.md says: it trains the same weights and averages of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.utils.data import DataLoader, TensorDataset

import unitrain
from unitrain.features.ema import EMA

State = dict[str, torch.Tensor]
EPOCHS, BATCH, DECAY = 2, 8, 0.9


def parts() -> tuple[TensorDataset, Any, Any, Any, Any]:
    """Return the data, and what timm makes of its flags: a model, an optimizer, a scheduler and a loss."""
    library: Any = import_module("timm")
    for name in ("loss", "optim", "scheduler"):
        import_module(f"timm.{name}")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(36, 3, 64, 64, generator=generator, dtype=torch.float64)
    data = TensorDataset(images, torch.randint(10, (36,), generator=generator))
    torch.manual_seed(0)
    model = library.create_model("test_resnet", num_classes=10).double()
    optimizer = library.optim.create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
    scheduler, _ = library.scheduler.create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=EPOCHS, warmup_epochs=1, updates_per_epoch=5, step_on_epochs=False
    )
    return data, model, optimizer, scheduler, library.loss.LabelSmoothingCrossEntropy(0.1)


def original() -> tuple[State, State]:
    """Train as train.py of timm 1.0 does, in order, and return the weights and their averages."""
    utils: Any = import_module("timm.utils")
    data, model, optimizer, scheduler, criterion = parts()
    ema = utils.ModelEmaV3(model, decay=DECAY)
    updates = 0
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in DataLoader(data, BATCH):
            criterion(model(images), labels).backward()
            utils.dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            ema.update(model)  # with a number, the first update would be a copy
            scheduler.step_update(updates)
        scheduler.step(epoch + 1)
    return model.state_dict(), ema.module.state_dict()


def ported() -> tuple[State, State]:
    data, model, optimizer, scheduler, criterion = parts()
    with unitrain.init(precision="fp64", device="cpu", clip_norm=1.0, sync_batchnorm=True) as strategy:
        model, optimizer = strategy.prepare(model, optimizer)
        ema = strategy.add(EMA(model, decay=DECAY))
        train = strategy.dataloader(data, global_batch_size=BATCH)
        for epoch in train.epochs(EPOCHS):
            for images, labels in train:
                if strategy.step(criterion(model(images), labels), optimizer).stepped:
                    scheduler.step_update(strategy.global_step)
            scheduler.step(epoch + 1)
        return strategy.export(model).state_dict(), strategy.export(ema).state_dict()


def test_timm() -> None:
    pytest.importorskip("timm")
    [expected] = run_ranks(original, nprocs=1, timeout=120)
    for state, theirs in zip(run_ranks(ported, timeout=120)[1], expected, strict=True):
        others = [name for name, value in theirs.items() if not torch.allclose(state[name], value, rtol=0, atol=1e-9)]
        assert not others
