"""FixMatch: a batch with labels, and one without that learns what the model is sure of; their loaders differ in length."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from tiny import BATCH, cross_entropy, data, net, sgd, step, whole_batches
from torch import Tensor, nn

from unitrain import Strategy


def consistency(model: nn.Module, weak: Tensor, strong: Tensor) -> Tensor:
    confidence, labels = model(weak).detach().softmax(1).max(1)
    return ((confidence > 0.4) * cross_entropy(model(strong), labels, reduction="none")).mean()


def train(strategy: Strategy) -> list[Any]:
    labelled = strategy.dataloader(data(6), global_batch_size=BATCH)
    unlabelled = strategy.dataloader(data(6, 6, rows=13), global_batch_size=6)
    model = net(6, 5, 3)
    model, optimizer = strategy.prepare(model, sgd(model))
    for _ in labelled.epochs(3):
        for batch, other in zip(labelled, cycle(unlabelled), strict=False):
            losses = [cross_entropy(model(batch[0]), batch[1]), consistency(model, other[0], other[1])]
            strategy.step(losses, optimizer, weight=[len(batch[0]), len(other[0])], batch=[batch, other])
    return [model]


def plain() -> list[Any]:
    model = net(6, 5, 3)
    optimizer = sgd(model)
    for _ in range(3):
        for (inputs, labels), (weak, strong, _) in zip(
            whole_batches(data(6)), cycle(whole_batches(data(6, 6, rows=13), 6)), strict=False
        ):
            step(cross_entropy(model(inputs), labels) + consistency(model, weak, strong), optimizer)
    return [model]
