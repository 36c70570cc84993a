"""Distillation: adapters of a frozen student learn from the outputs of a larger teacher, and from labels."""

from __future__ import annotations

from typing import Any

import torch
from tiny import BATCH, cross_entropy, data, net, sgd, step, whole_batches
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, softmax

from unitrain import Strategy


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    model = net(6, 5, 3)
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["0", "2"]))  # type: ignore[arg-type]


def loss_of(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    soft = kl_div(log_softmax(student / 2, 1), softmax(teacher / 2, 1), reduction="batchmean")
    return 4 * soft + cross_entropy(student, labels)


def train(strategy: Strategy) -> list[Any]:
    loader = strategy.dataloader(data(6), global_batch_size=BATCH)
    student, teacher = adapted(), net(6, 9, 3, seed=1).requires_grad_(False)
    student, teacher, optimizer = strategy.prepare(student, teacher, sgd(student))
    for _ in loader.epochs(2):
        for inputs, labels in loader:
            strategy.step(loss_of(student(inputs), teacher(inputs), labels), optimizer)
    return [student]


def plain() -> list[Any]:
    student, teacher = adapted(), net(6, 9, 3, seed=1).requires_grad_(False)
    optimizer = sgd(student)
    for _ in range(2):
        for inputs, labels in whole_batches(data(6)):
            step(loss_of(student(inputs), teacher(inputs), labels), optimizer)
    return [student]
