"""Which iterations of a loader count as epochs: complete ones, and those with a batch that was trained on."""

from __future__ import annotations

import dataclasses
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain.data import Loader
from unitrain.data.options import LoaderOptions, WorkerOptions
from unitrain.data.settings import LoaderSettings

ROWS = TensorDataset(torch.arange(12.0).unsqueeze(1))


def opened() -> tuple[unitrain.Strategy, Loader, nn.Module, torch.optim.Optimizer]:
    strategy = unitrain.init(backend="single")
    model, optimizer = strategy.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.001))
    return strategy, strategy.dataloader(ROWS, global_batch_size=4, shuffle=True), model, optimizer


def rows(batch: list[Tensor]) -> list[float]:
    return batch[0].flatten().tolist()


def test_a_peek_costs_no_epoch_and_no_batch() -> None:
    strategy, loader, model, optimizer = opened()
    peeked = rows(next(iter(loader)))
    epochs = []
    for epoch in loader.epochs(2):
        read = []
        for batch in loader:
            strategy.step(model(batch[0]).mean(), optimizer)
            read.append(rows(batch))
        epochs.append((epoch, read))
    assert [epoch for epoch, _ in epochs] == [0, 1]
    assert epochs[0][1][0] == peeked
    assert all(sorted(chain(*read)) == list(range(12)) for _, read in epochs)
    assert epochs[0][1] != epochs[1][1]


def test_one_batch_that_was_peeked_at_can_be_trained_on_again_and_again() -> None:
    strategy, loader, model, optimizer = opened()
    (batch,) = next(iter(loader))
    assert all(strategy.step(model(batch).mean(), optimizer).stepped for _ in range(3))
    assert loader.epoch == 0


def test_the_options_that_type_checkers_know_are_those_of_the_loader() -> None:
    named = {field.name for field in dataclasses.fields(LoaderSettings) if field.init} - {"dataset", "passed_on"}
    assert set(LoaderOptions.__annotations__) == named | set(WorkerOptions.__annotations__)
