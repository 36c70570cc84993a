"""Gradient noise of Neelakantan et al., the same on all ranks: added by a hook of the optimizer, to shards as well."""

from __future__ import annotations

from typing import Any

import torch
from tiny import BATCH, data, net, random, sgd
from torch.nn.functional import cross_entropy


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(data(6), global_batch_size=BATCH)
    model = net(6, 5, 3)
    model, optimizer = strategy.prepare(model, sgd(model))

    @torch.no_grad()
    def add_noise(*_: Any) -> None:
        step = strategy.global_step
        for place, p in enumerate(model.parameters()):
            noise = random(*p.shape, seed=100 * step + place) * 0.1 / (1 + step) ** 0.55
            p.grad.add_(strategy.shard_like(noise, p))

    optimizer.register_step_pre_hook(add_noise)
    for _ in loader.epochs(3):
        for inputs, labels in loader:
            strategy.step(cross_entropy(model(inputs), labels), optimizer)
    return [model]
