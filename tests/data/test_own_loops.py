"""Loops that train without ``strategy.step``, and leave an iteration early, continue where they were."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from pretended import pretended_rank
from torch import nn
from torch.utils.data import TensorDataset

from unitrain.data import Loader


def rows(loader: Loader, count: int | None = None) -> list[float]:
    return [row for (batch,) in islice(loader, count) for row in batch.flatten().tolist()]


def plain_loader(**given: Any) -> Loader:
    data = TensorDataset(torch.arange(20.0).unsqueeze(1))
    return pretended_rank().dataloader(data, **{"global_batch_size": 4, "shuffle": True, **given})


def own_loop(loader: Loader, count: int) -> list[float]:
    """Train on some batches, with a backward of its own."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read = []
    for number, (batch,) in enumerate(loader, 1):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        read += batch.flatten().tolist()
        if number == count:
            break
    return read


def test_an_own_loop_that_was_left_continues_where_it_was() -> None:
    loader, whole = plain_loader(), plain_loader()
    begun = own_loop(loader, 2)
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"], state["steps"]) == (0, 8, 2)
    other = plain_loader()
    other.load_state_dict(state)
    assert begun + rows(other) == rows(whole)
    assert rows(loader) == rows(whole), "the next iteration is the next epoch"


def test_an_own_loop_counts_in_the_remaining_epochs() -> None:
    loader = plain_loader()
    assert [(epoch, loader.epoch, len(own_loop(loader, 1))) for epoch in loader.epochs(3)] == [
        (0, 0, 4), (1, 1, 4), (2, 2, 4),
    ]  # fmt: skip


def test_a_look_is_free() -> None:
    loader = plain_loader()
    own_loop(plain_loader(), 2)  # of another loader
    first = rows(loader, 1)
    assert loader.state_dict() == plain_loader().state_dict()
    batches = iter(loader)
    next(batches)
    del batches
    assert rows(loader)[:4] == first


def test_an_iteration_that_is_left_without_training_does_not_count() -> None:
    loader = plain_loader()
    rows(loader, 2)
    assert loader.state_dict()["consumed"] == 0
    assert rows(loader) == rows(plain_loader())
    # An evaluation of some batches is the same each time.
    with torch.no_grad():
        assert rows(loader, 2) == rows(loader, 2)


def test_embeddings_keep_their_position_with_a_state_from_within_the_loop() -> None:
    loader, read = plain_loader(), []
    with torch.no_grad():
        for number, (batch,) in enumerate(loader, 1):
            read += batch.flatten().tolist()
            if number == 2:
                state = loader.state_dict()
                break
    other = plain_loader()
    other.load_state_dict(state)
    assert read + rows(other) == rows(plain_loader())


def test_steps_while_an_evaluation_is_open_do_not_count_for_it() -> None:
    train, shown = plain_loader(), plain_loader()
    with torch.no_grad():
        batches = iter(shown)
        next(batches)
    own_loop(train, 2)
    del batches
    assert (train.state_dict()["consumed"], shown.state_dict()["consumed"]) == (8, 0)
