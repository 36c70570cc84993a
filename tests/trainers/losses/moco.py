"""MoCo: an encoder of keys that follows the query encoder slowly, and a queue of the keys of earlier batches."""

from __future__ import annotations

from typing import Any

import torch
from tiny import BATCH, data, net, random, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

LENGTH, MOMENTUM, TEMPERATURE, EPOCHS = 12, 0.9, 0.2, 2


@torch.no_grad()
def follow(key: nn.Module, query: nn.Module) -> None:
    for k, q in zip(key.parameters(), query.parameters(), strict=True):
        k.mul_(MOMENTUM).add_(q, alpha=1 - MOMENTUM)


def contrast(queries: Tensor, keys: Tensor, queue: Tensor) -> Tensor:
    logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1) / TEMPERATURE
    return cross_entropy(logits, torch.zeros(len(queries), dtype=torch.long))


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(data(6, 6), global_batch_size=BATCH)
    query, key = net(6, 4, 3), net(6, 4, 3).requires_grad_(False)
    query, key, optimizer = strategy.prepare(query, key, sgd(query))
    queue = normalize(random(LENGTH, 3))
    for _ in loader.epochs(EPOCHS):
        for first, second, _ in loader:
            follow(key, query)
            keys = normalize(key(second))
            strategy.step(contrast(normalize(query(first)), keys, queue), optimizer)
            queue = torch.cat([strategy.gather(keys, in_order=loader), queue])[:LENGTH]
    return [query, key, queue]
