"""Duties of ``prepare``, for modules, optimizers and schedulers, and of copies of its results."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from unitrain import Strategy, UsageError, features
from unitrain.testing.duty import duty
from unitrain.testing.models import Net, Twins
from unitrain.testing.worlds import World


@duty()
def copies_and_exports(world: World) -> None:
    """A deep copy, such as an average of weights, works by itself or is refused, and an export is a plain model."""
    with world.open(precision="bf16", **features.declared("AS_ONE_DEVICE")) as strategy:
        model = Net(norm=True).float()
        prepared, optimizer = strategy.prepare(model, SGD(model.parameters(), lr=0.1))
        x = torch.randn(4, 4) + strategy.rank
        if world.shards:
            with pytest.raises(UsageError, match=r"use strategy\.export"):
                copy.deepcopy(prepared)
        else:
            _train_beside_a_copy(strategy, prepared, optimizer, x)
        exported = strategy.export(prepared)
        plain = Net(norm=True).float()
        assert [type(layer) for layer in exported.modules()] == [type(layer) for layer in plain.modules()]
        assert list(exported.state_dict()) == list(plain.state_dict())
        for layer, other in zip(exported.modules(), plain.modules(), strict=True):
            # Nothing that prepare() has set on a layer may be left in an export.
            assert set(vars(layer)) == set(vars(other))
            assert not any(getattr(layer, name) for name in vars(layer) if "hooks" in name)
        assert not exported.training
        assert exported(x).dtype == torch.float32
        # A model with hooks or wrappers of the library could not be pickled.
        torch.save(exported, io.BytesIO())
    # and after the end
    assert strategy.unwrap(prepared) is model
    if world.shards:
        with pytest.raises(UsageError, match=r"call export\(\) before"):
            strategy.export(prepared)
    else:
        assert type(strategy.export(prepared)) is Net


def _train_beside_a_copy(strategy: Strategy, prepared: nn.Module, optimizer: SGD, x: Tensor) -> None:
    """Train a model with an average of its weights beside it, as scripts keep one themselves.

    Args:
        strategy: the open strategy.
        prepared: the prepared model.
        optimizer: its optimizer.
        x: the inputs (rows, 4) of this rank.
    """
    average = copy.deepcopy(prepared)
    with strategy.evaluation(prepared, average):
        assert torch.equal(average(x), prepared(x))
        assert average(x).dtype == torch.bfloat16
    strategy.step(prepared(x).float().pow(2).mean(), optimizer)
    with strategy.evaluation(prepared, average):
        assert not torch.equal(average(x), prepared(x))
    with torch.no_grad():
        for averaged, trained in zip(average.parameters(), prepared.parameters(), strict=True):
            averaged.lerp_(trained, 0.5)
    # Only the prepared model has been trained.
    assert all(p.grad is None for p in average.parameters())
    strategy.step(prepared(x).float().pow(2).mean(), optimizer)  # the copy has not got in the way
    assert list(strategy.unwrap(average).state_dict()) == list(strategy.unwrap(prepared).state_dict())
    assert type(strategy.export(average)) is Net


@duty()
def compiled(world: World) -> None:
    """A compiled module trains, whether it is compiled before prepare() or after."""
    with world.open() as strategy:
        twins = Twins(strategy, wrap=_compiled)
        twins.train(2)
        twins.assert_same()
        assert strategy.unwrap(twins.prepared) is twins.model
        assert type(strategy.export(twins.prepared)) is Net
        later = Net()
        assert strategy.unwrap(_compiled(strategy.prepare(later))) is later


def _compiled(module: nn.Module) -> Any:
    """Return a module that torch's compiler traces, but does not compile to machine code, which takes long."""
    return torch.compile(module, backend="eager")
