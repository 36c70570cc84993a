"""A learning rate that a range test has found on a copy of the model, and an average of the weights of late epochs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tiny import BATCH, data, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

LOWEST, FACTOR, EPOCHS, FIRST_AVERAGED = 1e-3, 2.0, 4, 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def find_lr(strategy: Any, model: nn.Module) -> float:
    """Return the learning rate with which a step has lowered the loss most, in steps with higher and higher ones."""
    loader = strategy.dataloader(data(6, rows=18), global_batch_size=BATCH)
    optimizer = sgd(model, lr=LOWEST)
    scheduler = ExponentialLR(optimizer, FACTOR)
    model, optimizer, scheduler = strategy.prepare(model, optimizer, scheduler)
    losses = []
    for _ in loader.epochs(2):
        for inputs, labels in loader:
            loss, meter = cross_entropy(model(inputs), labels), strategy.meter()
            meter.add(mean=loss, count=len(labels))
            strategy.step(loss, optimizer, scheduler)
            losses.append(meter.value())
    return LOWEST * FACTOR ** int(torch.tensor(losses).diff().argmin())


def train(strategy: Any) -> list[Any]:
    model = network()
    with strategy.trial("lr-finder"):
        lr = find_lr(strategy, copy.deepcopy(model))
    loader = strategy.dataloader(data(6, rows=18), global_batch_size=BATCH)
    model, optimizer = strategy.prepare(model, sgd(model, lr=lr))
    average, scheduler = AveragedModel(strategy.unwrap(model)), SWALR(optimizer, swa_lr=lr / 2, anneal_epochs=2)
    for epoch in loader.epochs(EPOCHS):
        for inputs, labels in loader:
            strategy.step(cross_entropy(model(inputs), labels), optimizer)
        if epoch >= FIRST_AVERAGED:
            average.update_parameters(strategy.unwrap(model))
            scheduler.step()
    update_bn(loader, average)
    return [average.module, lr]
