"""Models and data for duties, and assertions that compare models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from unitrain import Strategy

EXACT = 1e-12
SAMPLES = 23  # uneven on 2 and on 3 ranks


def samples(count: int = SAMPLES) -> TensorDataset:
    """Return random inputs (count, 4) and targets (count, 2), the same in each call."""
    # Not the global generator: what a duty has drawn before must not change the samples.
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randn(count, 2, generator=generator, dtype=torch.float64))


def two_rows_each(strategy: Strategy) -> tuple[Tensor, Tensor, slice]:
    """Return the inputs (rows, 4) and targets (rows, 2) of all ranks, and the slice of this rank's two rows."""
    inputs, targets = samples(2 * strategy.world_size).tensors
    return inputs, targets, slice(2 * strategy.rank, 2 * strategy.rank + 2)


class Net(nn.Module):
    """Two linear layers, with or without BatchNorm between them."""

    def __init__(self, seed: int = 0, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first: nn.Linear = nn.Linear(4, 6)
        self.norm: nn.Module = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.last: nn.Linear = nn.Linear(6, 2)
        # In float64, deviations are rounding errors, or mistakes.
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (rows, 2) of inputs (rows, 4)."""
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


class Branches(nn.Module):
    """A model with two branches: a forward uses one of them, and never uses one layer."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk: nn.Linear = nn.Linear(4, 4)
        self.norm: nn.Module = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.left: nn.Linear = nn.Linear(4, 2)
        self.right: nn.Linear = nn.Linear(4, 2)
        self.never: nn.Linear = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        """Return outputs (rows, 2) of inputs (rows, 4), of the left branch (0) or the right one."""
        out: Tensor = (self.left if branch == 0 else self.right)(torch.tanh(self.norm(self.trunk(x))))
        return out


def sgd(model: nn.Module) -> SGD:
    """Return an SGD optimizer with momentum and weight decay."""
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def step_by_hand(loss: Tensor, *optimizers: Optimizer) -> None:
    """Make a step of a plain loop.

    Args:
        loss: the mean over the rows of all ranks.
        *optimizers: each makes a step.
    """
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()


class Twins:
    """Two equal models: the strategy trains one on each rank's rows, a plain loop the other on the rows of all ranks.

    Args:
        strategy: an open strategy, which prepares the first model.
        make: makes a model, the same in each call.
        optimize: makes the optimizer of a model.
        wrap: returns what is prepared in place of the model.

    Attributes:
        inputs: the rows of all ranks.
        mine: which of them are this rank's.
        rows: the rows of this rank.
    """

    def __init__(
        self,
        strategy: Strategy,
        make: Callable[[], nn.Module] = Net,
        optimize: Callable[[Any], Optimizer] = sgd,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        self._strategy = strategy
        self.model: Any = make()
        self.expected: Any = make()
        self.prepared: nn.Module
        self.optimizer: Optimizer
        # Wrapped before prepare, as by a script that compiles its model.
        self.prepared, self.optimizer = strategy.prepare(wrap(self.model), optimize(self.model))
        self.by_hand: Optimizer = optimize(self.expected)
        self.inputs: Tensor
        self.mine: slice
        self.inputs, self._targets, self.mine = two_rows_each(strategy)
        self.rows: Tensor = self.inputs[self.mine].to(strategy.device)
        self._own_targets: Tensor = self._targets[self.mine].to(strategy.device)

    def loss(self, *arguments: Any, scale: float = 1.0) -> Tensor:
        """Return the loss of the prepared model for this rank's rows.

        Args:
            *arguments: of the model, after the rows.
            scale: multiplies the rows.
        """
        return mse_loss(self.prepared(scale * self.rows, *arguments), self._own_targets)

    def loss_by_hand(self, *arguments: Any, scale: float = 1.0) -> Tensor:
        """Return the loss of the other model for the rows of all ranks, with the arguments of ``loss``."""
        return mse_loss(self.expected(scale * self.inputs, *arguments), self._targets)

    def train(self, steps: int = 3) -> None:
        """Train both models for some steps on the same rows."""
        for _ in range(steps):
            self._strategy.step(self.loss(), self.optimizer)
            step_by_hand(self.loss_by_hand(), self.by_hand)

    def assert_same(self) -> None:
        """Assert that both models have the same weights up to rounding, and all ranks the same bits. Collective."""
        assert_same(self.model, self.expected)
        assert_bit_equal_on_all_ranks(self._strategy, self.model)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, which is collective, and any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def flat(model: nn.Module) -> Tensor:
    """Return all parameters and buffers of a model in one float64 tensor on the CPU. Collective if they are sharded."""
    return torch.cat([whole(t.detach()).double().reshape(-1).cpu() for t in (*model.parameters(), *model.buffers())])


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    """Assert that two models have the same weights, up to rounding."""
    torch.testing.assert_close(flat(model), flat(expected), rtol=0, atol=EXACT)


def differing_ranks(strategy: Strategy, tensor: Tensor) -> list[int]:
    """Return the ranks with another tensor than rank 0, bit for bit. Collective."""
    gathered = strategy.communicator.all_gather(tensor)
    return [rank for rank, contribution in enumerate(gathered) if not torch.equal(contribution, gathered[0])]


def assert_bit_equal_on_all_ranks(strategy: Strategy, model: nn.Module) -> None:
    """Assert that a model's weights are equal on all ranks, bit for bit. Collective."""
    differing = differing_ranks(strategy, flat(model))
    assert not differing, f"the weights on ranks {differing} differ from those on rank 0"
