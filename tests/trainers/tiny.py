"""What the trainers share: tiny data and models in float64, and ``Plain``, which trains on whole batches.

The global batches end unevenly for two ranks, and the last one leaves rank 1 a stand-in.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Subset, TensorDataset

ROWS, BATCH, CLASSES = 16, 5, 3


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(*widths: int, rows: int = ROWS) -> TensorDataset:
    """Return random columns of these widths, and labels that the first column decides."""
    columns = [random(rows, width, seed=width + place) for place, width in enumerate(widths)]
    return TensorDataset(*columns, columns[0][:, :CLASSES].argmax(1))


def net(*widths: int, seed: int = 0) -> nn.Sequential:
    """Return linear layers of these widths, with tanh between them."""
    torch.manual_seed(seed)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def sgd(*modules: nn.Module, lr: float = 0.1) -> SGD:
    return SGD([p for module in modules for p in module.parameters() if p.requires_grad], lr=lr, momentum=0.9)


class Plain:
    """Stands for a strategy in the loop that a trainer is compared with: plain torch, without a rank."""

    def __init__(self) -> None:
        self.global_step, self.rank, self.world_size = 0, 0, 1

    def dataloader(self, dataset: Any, global_batch_size: int, sampler: Any = None) -> Batches:
        return Batches(dataset, global_batch_size, sampler)

    def prepare(self, *objects: Any) -> Any:
        return objects if len(objects) > 1 else objects[0]

    def step(self, loss: Any, optimizer: Any, scheduler: Any = None, **_: Any) -> None:
        self.backward(torch.stack(loss).sum() if isinstance(loss, list) else loss, optimizer)
        self.update(optimizer)
        if scheduler is not None:
            scheduler.step()

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.autograd.backward(loss, inputs=[p for p in parameters if p.requires_grad])

    def average(self, gradients: Any) -> Any:
        return gradients

    def update(self, optimizer: Any, closure: Any = None) -> None:
        if closure and all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        self.global_step += 1

    def gather(self, value: Any, *_: Any, **__: Any) -> Any:
        return value

    all_reduce = full_tensor = mean = shard_like = unwrap = gather

    def evaluation(self, _: nn.Module) -> Any:
        return torch.no_grad()

    @contextmanager
    def trial(self, _: str) -> Iterator[None]:
        outer, self.global_step = self.global_step, 0
        yield
        self.global_step = outer

    def meter(self) -> Any:
        return Last()

    def checkpoint(self, _: str, **objects: Any) -> Checkpoint:
        return Checkpoint(self, objects)


class Batches:
    """The whole batches of a loader."""

    def __init__(self, dataset: Any, size: int, sampler: Any) -> None:
        self.dataset, self.size, self.sampler = dataset, size, sampler

    def epochs(self, number: int) -> Iterator[int]:
        for epoch in range(number):
            if self.sampler:
                self.sampler.set_epoch(epoch)
            yield epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.tensor(list(self.sampler or range(len(self.dataset))))
        return (self.rows(rows) for rows in torch.split(order, self.size))

    def rows(self, indices: Tensor) -> Any:
        """Return rows of a dataset, or of a Subset, which takes no tensor."""
        dataset = self.dataset
        if isinstance(dataset, Subset):
            indices, dataset = torch.tensor(dataset.indices)[indices], dataset.dataset
        return dataset[indices] if isinstance(dataset, Tensor) else list(dataset[indices])


class Last:
    """A meter of a single batch."""

    def add(self, mean: Tensor, count: int) -> None:
        self.value = mean.item


class Checkpoint:
    """A checkpoint that keeps the best modules."""

    def __init__(self, plain: Plain, objects: dict[str, Any]) -> None:
        self.plain, self.step = plain, 0
        self.modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
        self.best: dict[str, Any] = {}

    def save(self, best: bool) -> None:
        if best:
            self.step = self.plain.global_step
            self.best = {name: copy.deepcopy(module.state_dict()) for name, module in self.modules.items()}

    def round(self) -> Any:
        return nullcontext()

    def resume(self, which: str = "") -> None:
        for name, state in self.best.items():
            self.modules[name].load_state_dict(state)
            self.plain.global_step = self.step
