"""A new loader in each round repeats the shuffle of the first: a warning."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unitrain import Strategy
from unitrain.data import Loader

DATA = TensorDataset(torch.randn(12, 2))


def prepared(strategy: Strategy) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(
    strategy: Strategy, loader: Loader, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int
) -> None:
    for number, (rows,) in enumerate(loader, 1):
        strategy.step(model(rows).mean(), optimizer)
        if number == steps:
            break


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("steps", [2, 99])
def test_a_second_loader_that_repeats_the_order_is_warned_of(strategy: Strategy, steps: int, optimizers: int) -> None:
    pairs = [prepared(strategy) for _ in range(optimizers)]

    def round_of_training() -> None:
        loader = strategy.dataloader(DATA, batch_size=4, shuffle=True)
        next(iter(loader))
        for number, (rows,) in enumerate(loader, 1):
            strategy.step(sum(model(rows).mean() for model, _ in pairs), [optimizer for _, optimizer in pairs])
            if number == steps:
                break

    round_of_training()
    with pytest.warns(UserWarning, match=r"a second loader that was made at .*test_repeated_order.py:\d+ has shuffled"):
        round_of_training()


def test_other_rounds_are_not_warned_of(strategy: Strategy) -> None:
    trained = prepared(strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(2):
            loader = strategy.dataloader(DATA, batch_size=4, shuffle=True)
            loader.epoch = number
            train(strategy, loader, *trained, steps=99)
        for _ in range(2):
            train(strategy, strategy.dataloader(DATA, batch_size=4), *trained, steps=99)
        pair = [strategy.dataloader(DATA, batch_size=4, shuffle=True) for _ in range(2)]
        for (rows,), (others,) in zip(*pair, strict=True):  # side by side
            strategy.step(trained[0](torch.cat([rows, others])).mean(), trained[1], weight=4)
        for data in (DATA, DATA):
            with torch.no_grad():
                list(strategy.dataloader(data, batch_size=4, shuffle=True))
        for _ in range(2):  # a fold trains its own model
            train(strategy, strategy.dataloader(DATA, batch_size=4, shuffle=True), *prepared(strategy), steps=99)
        for fold in [prepared(strategy) for _ in range(2)]:  # and so if all are there from the beginning
            train(strategy, strategy.dataloader(DATA, batch_size=4, shuffle=True), *fold, steps=99)
