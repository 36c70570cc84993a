"""Reptile: the weights move to those that a few steps on each task lead to; the ranks divide the tasks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tiny import BATCH, ROWS, net, random
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import TensorDataset


def tasks() -> TensorDataset:
    """Return points of a sine with a random phase for each task."""
    x, phase = random(ROWS, 6, 1), random(ROWS, 1, 1, seed=2)
    return TensorDataset(x, (x + phase).sin())


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(tasks(), global_batch_size=BATCH)
    model = net(1, 5, 1)
    learner = copy.deepcopy(model)
    model, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.5))
    for _ in loader.epochs(2):
        for batch in loader:
            moves = [torch.zeros_like(p) for p in model.parameters()]
            for x, y in zip(*batch, strict=True):
                learner.load_state_dict(strategy.unwrap(model).state_dict())
                inner = SGD(learner.parameters(), lr=0.1)
                for _ in range(3):
                    inner.zero_grad()
                    torch.autograd.backward(mse_loss(learner(x), y))
                    inner.step()
                for move, p, q in zip(moves, model.parameters(), learner.parameters(), strict=True):
                    move += (p - q).detach() / len(batch[0])
            for p, move in zip(model.parameters(), strategy.average(moves), strict=True):
                p.grad = move
            strategy.update(optimizer)
    return [model]
