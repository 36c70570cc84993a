"""A sweep over learning rates, each of them scored by a cross-validation: trials within trials."""

from __future__ import annotations

from typing import Any

import torch
from tiny import BATCH, ROWS, data, net, sgd
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

FOLDS, RATES = 3, (0.01, 0.1)


def fold(strategy: Any, lr: float, number: int) -> tuple[Any, float]:
    """Train on all but every third sample, and return the model and its loss on these."""
    samples, held = data(6), torch.arange(ROWS) % FOLDS == number
    loader = strategy.dataloader(Subset(samples, (~held).nonzero().flatten().tolist()), global_batch_size=BATCH)
    others = strategy.dataloader(Subset(samples, held.nonzero().flatten().tolist()), global_batch_size=ROWS)
    model = net(6, 5, 3)
    model, optimizer = strategy.prepare(model, sgd(model, lr=lr))
    for _ in loader.epochs(2):
        for inputs, labels in loader:
            strategy.step(cross_entropy(model(inputs), labels), optimizer)
    losses = strategy.meter()
    with strategy.evaluation(model):
        for inputs, labels in others:
            losses.add(mean=cross_entropy(model(inputs), labels), count=len(labels))
    return model, losses.value()


def train(strategy: Any) -> list[Any]:
    models, scores = [], {}
    for lr in RATES:
        with strategy.trial(f"lr-{lr}"):
            losses = []
            for number in range(FOLDS):
                with strategy.trial(f"fold-{number}"):
                    model, loss = fold(strategy, lr, number)
                    models.append(model)
                    losses.append(loss)
            scores[lr] = sum(losses) / FOLDS
    return [*models, *scores.values()]
