"""Distillation: adapters of a frozen student learn from the outputs of a larger teacher, and from labels."""

from __future__ import annotations

from typing import Any

import torch
from tiny import BATCH, data, net, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    model = net(6, 5, 3)
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["0", "2"]))


def loss_of(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    soft = kl_div(log_softmax(student / 2, 1), softmax(teacher / 2, 1), reduction="batchmean")
    return 4 * soft + cross_entropy(student, labels)


def train(strategy: Any) -> list[Any]:
    loader = strategy.dataloader(data(6), global_batch_size=BATCH)
    student, teacher = adapted(), net(6, 9, 3, seed=1).requires_grad_(False)
    student, teacher, optimizer = strategy.prepare(student, teacher, sgd(student))
    for _ in loader.epochs(2):
        for inputs, labels in loader:
            strategy.step(loss_of(student(inputs), teacher(inputs), labels), optimizer)
    return [student]
