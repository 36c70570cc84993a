"""Data and models that the trainers share: float64, so small that a step takes a millisecond.

The global batches end unevenly for two ranks, and the last one leaves rank 1 a stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import TensorDataset

ROWS, BATCH, CLASSES = 16, 5, 3


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(*widths: int, rows: int = ROWS) -> TensorDataset:
    """Return random columns of these widths, the first of which decides the label, the last column."""
    columns = [random(rows, width, seed=width + place) for place, width in enumerate(widths)]
    return TensorDataset(*columns, columns[0][:, :CLASSES].argmax(1))


def whole_batches(dataset: TensorDataset, size: int = BATCH) -> Iterator[Any]:
    return zip(*(column.split(size) for column in dataset.tensors), strict=True)


def net(*widths: int, seed: int = 0) -> nn.Sequential:
    """Return linear layers of these widths, with tanh between them."""
    torch.manual_seed(seed)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def sgd(*modules: nn.Module, lr: float = 0.1) -> SGD:
    return SGD([p for module in modules for p in module.parameters() if p.requires_grad], lr=lr, momentum=0.9)


def step(loss: Tensor, optimizer: SGD) -> None:
    """Make a step of a plain loop."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad()
    torch.autograd.backward(loss, inputs=[p for p in parameters if p.requires_grad])
    optimizer.step()


cross_entropy = functional.cross_entropy
