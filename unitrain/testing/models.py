"""Models and data for duties, and assertions that compare models."""

from __future__ import annotations

from collections.abc import Callable

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
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randn(count, 2, generator=generator, dtype=torch.float64))


def two_rows_each(strategy: Strategy) -> tuple[Tensor, Tensor, slice]:
    """Return the inputs and targets of all ranks, two rows per rank, and the slice of this rank."""
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
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (rows, 2) of inputs (rows, 4)."""
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


class Branches(nn.Module):
    """A model of which a forward uses one of two branches, and never uses one layer."""

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


def train_both(
    strategy: Strategy, prepared: nn.Module, optimizer: Optimizer, expected: nn.Module, by_hand: Optimizer, steps: int
) -> None:
    """Train two models for some steps: one with the strategy on this rank's rows, the other by hand on all rows."""
    inputs, targets, mine = two_rows_each(strategy)
    for _ in range(steps):
        strategy.step(mse_loss(prepared(inputs[mine]), targets[mine]), optimizer)
        by_hand.zero_grad()
        mse_loss(expected(inputs), targets).backward()  # type: ignore[no-untyped-call]
        by_hand.step()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor of which a rank may have a shard, as a DTensor. Collective then."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def flat(model: nn.Module, part: Callable[[Tensor], Tensor] = whole) -> Tensor:
    """Return all parameters and buffers of a model in one tensor."""
    return torch.cat([part(t.detach()).double().reshape(-1) for t in (*model.parameters(), *model.buffers())])


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    """Assert that two models have the same weights, up to rounding."""
    torch.testing.assert_close(flat(model), flat(expected), rtol=0, atol=EXACT)


def assert_bit_equal_on_all_ranks(strategy: Strategy, model: nn.Module) -> None:
    """Assert that a model's weights are equal on all ranks, bit for bit."""
    everyone = strategy.all_gather(flat(model))
    differing = [rank for rank, one in enumerate(everyone) if not torch.equal(one, everyone[0])]
    assert not differing, f"the weights on ranks {differing} differ from those on rank 0"
