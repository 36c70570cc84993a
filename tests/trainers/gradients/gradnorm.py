"""GradNorm: learned weights of tasks, which balance the norms of their gradients of a shared layer."""

from __future__ import annotations

from typing import Any

import torch
from tiny import BATCH, data, net, sgd
from torch.nn.functional import cross_entropy


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(data(6), global_batch_size=BATCH)
    model = net(6, 5, 4)
    model, optimizer = strategy.prepare(model, sgd(model))
    shared, weights, first = next(model.parameters()), torch.ones(2, dtype=torch.float64, requires_grad=True), None
    for _ in loader.epochs(3):
        for inputs, labels in loader:
            outputs = model(inputs)
            losses = [cross_entropy(outputs[:, :3], labels), (outputs[:, 3] - inputs[:, 0]).square().mean()]
            gradients = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
            norms = torch.stack([strategy.average(gradient)[0].norm() for gradient in gradients])
            means = strategy.mean(torch.stack(losses).detach())
            first = means if first is None else first
            rates = means / first
            targets = (weights * norms).mean() * (rates / rates.mean()) ** 1.5
            [change] = torch.autograd.grad((weights * norms - targets.detach()).abs().sum(), weights)
            strategy.step(weights.detach() @ torch.stack(losses), optimizer)
            with torch.no_grad():
                weights -= 0.05 * change
                weights *= len(weights) / weights.sum()
    return [model, weights.detach()]
