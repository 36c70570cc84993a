"""The accumulation window: the sum of its micro-batches, and what may not happen within it."""

from __future__ import annotations

import copy

import pytest
import torch
from needs import HOROVOD
from plain_loop import Ready, assert_equal, data, model_of, prepare_model, ready, sgd, strategy_of, weights
from ranks import on_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import unitrain
from unitrain import UsageError
from unitrain.testing.models import step_by_hand

__all__ = ["ready"]  # the fixture


def test_one_micro_batch_is_stepped_once(ready: Ready) -> None:
    strategy, model, optimizer = ready
    for inputs, targets in strategy.dataloader(data(), global_batch_size=10):
        strategy.step(mse_loss(model(inputs), targets), optimizer)
        with pytest.raises(UsageError, match="twice for one micro-batch"):
            strategy.step(mse_loss(model(inputs), targets), optimizer)
        break


@pytest.mark.parametrize("left_out", [0, 1, 3])
def test_a_micro_batch_that_was_left_out_is_noticed(ready: Ready, left_out: int) -> None:
    strategy, model, optimizer = ready
    # The first one, left out, looks like one taken ahead, until a batch weighs differently.
    said = "several batches were taken" if left_out == 0 else r"step\(\) was not called for a micro-batch"
    with pytest.raises(UsageError, match=said):  # noqa: PT012
        for i, (inputs, targets) in enumerate(strategy.dataloader(data(), global_batch_size=6)):
            if i != left_out:
                strategy.step(mse_loss(model(inputs), targets), optimizer)


def test_an_epoch_broken_off_in_a_window_leaves_nothing_for_the_next(ready: Ready) -> None:
    strategy, model, optimizer = ready
    expected = copy.deepcopy(model)
    loader = strategy.dataloader(data(), global_batch_size=10)
    for _ in range(2):
        for inputs, targets in loader:
            strategy.step(mse_loss(model(inputs), targets), optimizer)
            break
    before = weights(model)
    for i, (inputs, targets) in enumerate(loader):
        strategy.step(mse_loss(model(inputs), targets), optimizer)
        if i == 1:
            break
    assert not torch.equal(weights(model), before)
    inputs, targets = data().tensors
    step_by_hand(mse_loss(expected(inputs[:10]), targets[:10]), sgd(expected))
    assert_equal(model, expected)


@pytest.mark.parametrize("change", ["zero_grad", "set_to_zero", "clip"])
def test_gradients_that_are_changed_within_a_window_are_noticed(change: str) -> None:
    strategy = strategy_of(accumulate=2)
    model, optimizer = prepare_model(strategy)
    for step, (inputs, targets) in enumerate(strategy.dataloader(data(), global_batch_size=8)):
        if step == 1:
            with pytest.raises(UsageError, match=r"since the last backward, .* remove zero_grad"):
                strategy.step(mse_loss(model(inputs), targets), optimizer)
            break
        strategy.step(mse_loss(model(inputs), targets), optimizer)
        if change == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        else:
            optimizer.zero_grad(set_to_none=change == "zero_grad")


def test_zero_grad_between_windows_does_no_harm() -> None:
    strategy = strategy_of()
    model, optimizer = prepare_model(strategy)
    for inputs, targets in strategy.dataloader(data(), global_batch_size=8):
        optimizer.zero_grad()
        strategy.step(mse_loss(model(inputs), targets), optimizer)
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=HOROVOD)])
@on_ranks()
def test_clipping_between_backward_and_update_is_noticed_on_every_rank(backend: str) -> None:
    with unitrain.init(backend=backend, device="cpu", timeout_s=30) as strategy:
        model, optimizer = strategy.prepare(model := nn.Linear(4, 2), sgd(model))
        strategy.backward(model(torch.ones(2, 4)).sum(), optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(UsageError, match="changed or cleared since the last backward"):
            strategy.update(optimizer)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_micro_batches_of_a_given_size_give_the_gradient_of_the_whole_window(micro_batch_size: int) -> None:
    strategy = strategy_of()
    model, optimizer = prepare_model(strategy)
    loader = strategy.dataloader(data(), global_batch_size=5, micro_batch_size=micro_batch_size)
    for _ in range(2):
        for inputs, targets in loader:
            assert len(targets) <= micro_batch_size
            strategy.step(mse_loss(model(inputs), targets), optimizer)
    expected = model_of()
    by_hand = sgd(expected)
    for _ in range(2):
        for inputs, targets in DataLoader(data(), batch_size=5):
            step_by_hand(mse_loss(expected(inputs), targets), by_hand)
    assert_equal(model, expected)
    assert strategy.global_step == 2 * loader.steps_per_epoch
