"""LBFGS: the optimizer calls for the loss of all samples as often as it needs it."""

from __future__ import annotations

from typing import Any

import torch
from tiny import ROWS, data, net
from torch import Tensor
from torch.nn.functional import cross_entropy


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(data(6), global_batch_size=ROWS)
    model = net(6, 4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    model, optimizer = strategy.prepare(model, optimizer)
    for _ in loader.epochs(3):
        for inputs, labels in loader:

            def closure() -> Tensor:
                loss = cross_entropy(model(inputs), labels)  # noqa: B023
                strategy.backward(loss, optimizer)
                mean: Tensor = strategy.mean(loss.detach())
                return mean

            strategy.update(optimizer, closure=closure)
    return [model]
