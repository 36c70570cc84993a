"""DINO: a student learns the outputs of a teacher that follows it, less their mean; its last layer is frozen first."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
from moco import follow
from tiny import BATCH, data, net, sgd
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

EPOCHS = 3


def network() -> nn.Sequential:
    model = net(6, 4, 5)
    weight_norm(model[2])
    model[2].get_parameter("parametrizations.weight.original0").requires_grad_(False)
    return model


def distance(student: list[Tensor], teacher: list[Tensor], centre: Tensor) -> Tensor:
    targets = [torch.softmax((outputs - centre) / 0.04, 1) for outputs in teacher]
    logs = [torch.log_softmax(outputs / 0.1, 1) for outputs in student]
    pairs = [(t, s) for t, s in permutations(range(len(logs)), 2) if t < len(targets)]
    return torch.stack([-(targets[t] * logs[s]).sum(1).mean() for t, s in pairs]).mean()


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(data(6, 6, 6), global_batch_size=BATCH)
    student, teacher, centre = network(), network().requires_grad_(False), torch.zeros(5)
    student, teacher, optimizer = strategy.prepare(student, teacher, sgd(student))
    for epoch in loader.epochs(EPOCHS):
        direction = strategy.unwrap(student)[2].parametrizations.weight.original1
        direction.requires_grad_(epoch > 0)
        for *views, _ in loader:
            outputs = [teacher(view) for view in views[:2]]
            strategy.step(distance([student(view) for view in views], outputs, centre), optimizer)
            follow(teacher, student)
            centre = 0.9 * centre + 0.1 * strategy.mean(torch.cat(outputs).mean(0))
    return [student, teacher, centre]
