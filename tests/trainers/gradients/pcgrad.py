"""PCGrad: the gradient of a task loses its part against those of other tasks."""

from __future__ import annotations

from typing import Any

import torch
from tiny import BATCH, data, net, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector


def without_conflicts(gradients: list[Tensor]) -> Tensor:
    """Return the sum of the gradients, each without its projection on those that point the other way."""
    changed = []
    for gradient in gradients:
        for other in gradients:
            gradient = gradient - (gradient @ other).clamp(max=0) / (other @ other) * other
        changed.append(gradient)
    return torch.stack(changed).sum(0)


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(data(6), global_batch_size=BATCH)
    model = net(6, 5, 4)
    model, optimizer = strategy.prepare(model, sgd(model))
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    for _ in loader.epochs(3):
        for inputs, labels in loader:
            outputs = model(inputs)
            losses = [cross_entropy(outputs[:, :3], labels), (outputs[:, 3] - inputs[:, 0]).square().mean()]
            gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
            whole = without_conflicts([parameters_to_vector(strategy.average(each)) for each in gradients])
            for p, part in zip(parameters, torch.split(whole, sizes), strict=True):
                p.grad = part.view_as(p)
            strategy.update(optimizer)
    return [model]
