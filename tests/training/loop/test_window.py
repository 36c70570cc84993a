"""The accumulation window: the sum of its micro-batches, and what ends it early."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from needs import HOROVOD
from plain_loop import Ready, assert_equal, data, model_of, plain, ready, sgd, strategy_of, trained, weights
from ranks import run_ranks
from torch.nn.functional import mse_loss

import unitrain
from unitrain import UsageError

__all__ = ["ready"]  # the fixture


@pytest.mark.parametrize("accumulate", [2, 3, 4])
def test_accumulation_gives_the_gradient_of_the_whole_window(accumulate: int) -> None:
    """Micro-batches are uneven, and the last window of an epoch (2 samples) has fewer of them."""
    assert_equal(trained(strategy_of(accumulate=accumulate), 5), plain(5))


def test_results_of_a_window() -> None:
    strategy = strategy_of(accumulate=2)
    model, optimizer = strategy.prepare(*(lambda m: (m, sgd(m)))(model_of()))
    loader = strategy.dataloader(data(), global_batch_size=20)
    results = [strategy.step(mse_loss(model(x), y), optimizer) for x, y in loader]
    # 10 + 10 samples, then a partial window of 2, which one micro-batch holds
    assert [(r.stepped, r.skipped, r.grad_norm) for r in results] == [
        (False, False, None),
        (True, False, None),
        (True, False, None),
    ]
    assert all(p.grad is None for p in model.parameters())


def test_without_a_loader_micro_batches_weigh_the_same() -> None:
    strategy = strategy_of(accumulate=2)
    model = model_of()
    expected = copy.deepcopy(model)
    prepared, optimizer = strategy.prepare(model, sgd(model))
    x = torch.randn(6, 4, dtype=torch.float64)
    for rows in (x[:2], x[2:]):
        strategy.step(prepared(rows).pow(2).mean(), optimizer)
    plain_optimizer = sgd(expected)
    (expected(x[:2]).pow(2).mean() / 2 + expected(x[2:]).pow(2).mean() / 2).backward()
    plain_optimizer.step()
    assert_equal(model, expected)


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
    plain_optimizer = sgd(expected)
    mse_loss(expected(inputs[:10]), targets[:10]).backward()  # type: ignore[no-untyped-call]
    plain_optimizer.step()
    assert_equal(model, expected)


def test_a_loader_s_window_can_not_be_ended_early(ready: Ready) -> None:
    strategy, model, optimizer = ready
    for inputs, targets in strategy.dataloader(data(), global_batch_size=10):
        with pytest.raises(UsageError, match="sync=True"):
            strategy.backward(mse_loss(model(inputs), targets), optimizer, sync=True)
        break


@pytest.mark.parametrize("change", ["zero_grad", "set_to_zero", "clip"])
def test_gradients_that_are_changed_within_a_window_are_noticed(change: str) -> None:
    strategy = strategy_of(accumulate=2)
    model = model_of()
    model, optimizer = strategy.prepare(model, sgd(model))
    for step, (inputs, targets) in enumerate(strategy.dataloader(data(), global_batch_size=8)):
        if step == 1:
            with pytest.raises(UsageError, match="after micro-batch 1 of an accumulation window: remove zero_grad"):
                strategy.step(mse_loss(model(inputs), targets), optimizer)
            break
        strategy.step(mse_loss(model(inputs), targets), optimizer)
        if change == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        else:
            optimizer.zero_grad(set_to_none=change == "zero_grad")


def test_zero_grad_between_windows_does_no_harm() -> None:
    strategy = strategy_of()
    model = model_of()
    model, optimizer = strategy.prepare(model, sgd(model))
    for inputs, targets in strategy.dataloader(data(), global_batch_size=8):
        optimizer.zero_grad()
        strategy.step(mse_loss(model(inputs), targets), optimizer)
        optimizer.zero_grad(set_to_none=False)


def test_gradients_that_are_changed_before_they_are_averaged_are_noticed() -> None:
    strategy = strategy_of()
    model = model_of()
    model, optimizer = strategy.prepare(model, sgd(model))
    inputs, targets = data().tensors
    strategy.backward(mse_loss(model(inputs), targets), optimizer)
    strategy.backward(mse_loss(model(inputs), targets), optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UsageError, match=r"changed between backward\(\) and update\(\)"):
        strategy.update(optimizer)


def clip_between(backend: str) -> str:
    with unitrain.init(backend=backend, device="cpu", timeout_s=30) as strategy:
        model = model_of().float()
        prepared, optimizer = strategy.prepare(model, sgd(model))
        strategy.backward(prepared(torch.ones(2, 4)).sum(), optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(UsageError) as refused:
            strategy.update(optimizer)
        return str(refused.value)


@pytest.mark.parametrize(
    ("backend", "launcher"), [("ddp", "spawn"), pytest.param("horovod", "horovodrun", marks=HOROVOD)]
)
def test_clipping_between_backward_and_update_is_noticed_on_every_rank(backend: str, launcher: Any) -> None:
    for said in run_ranks(clip_between, backend, launcher=launcher):
        assert "changed between backward() and update()" in said


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 5, 8])
def test_micro_batches_of_a_given_size_give_the_gradient_of_the_whole_window(micro_batch_size: int) -> None:
    strategy = strategy_of()
    model = model_of()
    model, optimizer = strategy.prepare(model, sgd(model))
    loader = strategy.dataloader(data(), global_batch_size=5, micro_batch_size=micro_batch_size)
    for _ in range(2):
        for inputs, targets in loader:
            assert len(targets) <= micro_batch_size
            strategy.step(mse_loss(model(inputs), targets), optimizer)
    assert_equal(model, plain(5))
    assert strategy.global_step == 2 * loader.steps_per_epoch


def train_in_micro_batches(size: int) -> list[float]:
    with unitrain.init(backend="ddp", device="cpu", precision="fp64", timeout_s=30) as strategy:
        model = model_of()
        prepared, optimizer = strategy.prepare(model, sgd(model))
        loader = strategy.dataloader(data(), global_batch_size=8, micro_batch_size=size)
        for _ in range(2):
            for inputs, targets in loader:
                assert len(targets) <= size
                strategy.step(mse_loss(prepared(inputs), targets), optimizer)
        return weights(model).tolist()


@pytest.mark.parametrize(("size", "nprocs"), [(1, 2), (2, 2), (2, 3), (4, 2)])
def test_the_number_of_micro_batches_follows_from_the_number_of_processes(size: int, nprocs: int) -> None:
    for found in run_ranks(train_in_micro_batches, size, nprocs=nprocs):
        assert found == pytest.approx(weights(plain(8)).tolist(), abs=1e-12)
