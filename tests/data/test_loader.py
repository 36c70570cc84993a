"""A loader's options, and a batch that a script has peeked at."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

import unitrain
from unitrain.data.options import LoaderOptions, WorkerOptions
from unitrain.data.settings import LoaderSettings


def test_one_batch_that_was_peeked_at_can_be_trained_on_again_and_again() -> None:
    with unitrain.init(backend="single") as strategy:
        model, optimizer = strategy.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.001))
        loader = strategy.dataloader(torch.ones(12, 1), global_batch_size=4, shuffle=True)
        batch = next(iter(loader))
        assert all(strategy.step(model(batch).mean(), optimizer).stepped for _ in range(3))
        assert loader.epoch == 0


def test_the_options_that_type_checkers_know_are_those_of_the_loader() -> None:
    named = {field.name for field in dataclasses.fields(LoaderSettings) if field.init} - {"dataset", "passed_on"}
    assert set(LoaderOptions.__annotations__) == named | set(WorkerOptions.__annotations__)
