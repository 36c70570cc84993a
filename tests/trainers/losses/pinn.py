"""A physics-informed network: the loss has derivatives by the inputs at random points, and values at the boundary."""

from __future__ import annotations

import math
from typing import Any

import torch
from tiny import BATCH, ROWS, net, random, sgd
from torch import Tensor, nn
from torch.utils.data import TensorDataset

ENDS = torch.tensor([[0.0], [math.pi]], dtype=torch.float64)


def points() -> TensorDataset:
    return TensorDataset(math.pi * random(ROWS, 1).sigmoid())


def residual(model: nn.Module, x: Tensor) -> Tensor:
    """Return how far u'' is from -sin x."""
    u = model(x.requires_grad_())
    [first] = torch.autograd.grad(u.sum(), x, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (second + x.sin()).square().mean()


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(points(), global_batch_size=BATCH)
    model = net(1, 6, 1)
    model, optimizer = strategy.prepare(model, sgd(model, lr=0.01))
    for _ in loader.epochs(3):
        for batch in loader:
            losses = [residual(model, batch[0]), model(ENDS).square().mean()]
            strategy.step(losses, optimizer, weight=[len(batch[0]), 1], batch=[batch, None])
    return [model]
