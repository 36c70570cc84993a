"""Trainers of many shapes, each as a script would be written: the weights of a plain loop on whole batches."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

import unitrain

SETTINGS: dict[str, dict[str, dict[str, Any]]] = {"wgan": {"fsdp": {"fsdp": {"reshard_after_backward": False}}}}
CASES = [(trainer, backend) for trainer in ("moco", "dino", "lora_distillation", "curriculum", "wgan", "two_loaders") for backend in ("ddp", "horovod", "fsdp")]


def tensors(values: list[Any], strategy: unitrain.Strategy | None = None) -> Iterator[Tensor]:
    """Yield what was trained: the weights and buffers of modules as whole tensors, and other tensors."""
    for value in values:
        if isinstance(value, nn.Module):
            value = strategy.unwrap(value) if strategy else value
            for tensor in (*value.parameters(), *value.buffers()):
                yield strategy.full_tensor(tensor.detach()) if strategy else tensor.detach()
        else:
            yield value if isinstance(value, Tensor) else torch.tensor(value)


@pytest.mark.parametrize(("trainer", "backend"), CASES)
@on_ranks()
def test_a_trainer(trainer: str, backend: str) -> None:
    script = import_module(trainer)
    settings = SETTINGS.get(trainer, {}).get(backend, {})
    with unitrain.init(backend=backend, precision="fp64", device="cpu", **settings) as strategy:
        trained = list(tensors(script.train(strategy), strategy))
    for ours, expected in zip(trained, tensors(script.plain()), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)
