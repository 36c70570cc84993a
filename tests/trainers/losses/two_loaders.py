"""FixMatch: a batch with labels, and one without labels that learns what the model is sure of, from another loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiny import BATCH, data, net, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def consistency(model: nn.Module, weak: Tensor, strong: Tensor) -> Any:
    confidence, labels = model(weak).detach().softmax(1).max(1)
    return ((confidence > 0.4) * cross_entropy(model(strong), labels, reduction="none")).mean()


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def train(strategy: Any) -> list[Any]:
    labelled = strategy.dataloader(data(6), global_batch_size=BATCH)
    unlabelled = strategy.dataloader(data(6, 6, rows=13), global_batch_size=6)
    model = net(6, 5, 3)
    model, optimizer = strategy.prepare(model, sgd(model))
    others = endless(unlabelled)
    for _ in labelled.epochs(3):
        for batch in labelled:
            other = next(others)
            losses = [cross_entropy(model(batch[0]), batch[1]), consistency(model, other[0], other[1])]
            strategy.step(losses, optimizer, weight=[len(batch[0]), len(other[0])], batch=[batch, other])
    return [model]
