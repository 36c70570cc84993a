"""SAM as it was published: the optimizer moves to the worst weights near by, and steps with the gradient from there."""

from __future__ import annotations

from typing import Any

import torch
from tiny import BATCH, data, net
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer


class SAM(Optimizer):
    def __init__(self, parameters: Any, base: type[Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad * (self.defaults["rho"] / norm))
        torch.enable_grad()(closure)()
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
        self.base.step()


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(data(6), global_batch_size=BATCH)
    model = net(6, 5, 3)
    model, optimizer = strategy.prepare(model, SAM(model.parameters(), SGD, lr=0.1, momentum=0.9))
    for _ in loader.epochs(3):
        for inputs, labels in loader:

            def closure() -> None:
                strategy.backward(cross_entropy(model(inputs), labels), optimizer)  # noqa: B023

            strategy.update(optimizer, closure=closure)
    return [model]
