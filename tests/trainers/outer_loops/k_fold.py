"""Cross-validation: each fold is a trial, and so is each point of a sweep."""

from __future__ import annotations

from typing import Any

import torch
from tiny import BATCH, ROWS, data, net, sgd
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

FOLDS = 2


def fold(strategy: Any, number: int) -> tuple[Any, float]:
    """Train on all samples but a fold, and return the model and its loss on this fold."""
    samples, held = data(6), torch.arange(ROWS) % FOLDS == number
    loader = strategy.dataloader(Subset(samples, (~held).nonzero().flatten().tolist()), global_batch_size=BATCH)
    others = strategy.dataloader(Subset(samples, held.nonzero().flatten().tolist()), global_batch_size=ROWS)
    model = net(6, 5, 3)
    model, optimizer = strategy.prepare(model, sgd(model))
    for _ in loader.epochs(3):
        for inputs, labels in loader:
            strategy.step(cross_entropy(model(inputs), labels), optimizer)
    losses = strategy.meter()
    with strategy.evaluation(model):
        for inputs, labels in others:
            losses.add(mean=cross_entropy(model(inputs), labels), count=len(labels))
    return model, losses.value()


def train(strategy: Any) -> list[Any]:
    models, scores = [], []
    for number in range(FOLDS):
        with strategy.trial(f"fold-{number}"):
            model, loss = fold(strategy, number)
        models.append(model)
        scores.append(loss)
    return [*models, sum(scores) / FOLDS]
