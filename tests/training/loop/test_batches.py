"""Which batch a loss is of, in scripts that take batches ahead, or from two loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import unitrain
from unitrain import Strategy, UsageError
from unitrain.data.loop import Iteration
from unitrain.data.order.sharding import MicroBatch
from unitrain.training.loop.batches import OpenBatches

SAMPLES, GLOBAL_BATCH = 11, 4  # 4, 4 and 3: the last batch weighs differently on each rank
EPOCHS = 2


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=generator), torch.randn(SAMPLES, 1, generator=generator))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 1)


@contextmanager
def prepared(backend: str, **settings: Any) -> Iterator[tuple[Strategy, nn.Module, torch.optim.Optimizer]]:
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=30, **settings) as strategy:
        model = net()
        yield (strategy, *strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))


def weights(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


Loop = Callable[[Strategy, nn.Module, torch.optim.Optimizer, Any], None]


def plain(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            strategy.step(mse_loss(model(inputs), targets.double()), optimizer)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def prefetched_after_the_forward(
    strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> None:
    """The idiom of nanoGPT."""
    batches = endless(loader)
    inputs, targets = next(batches)
    for _ in range(EPOCHS * len(loader)):
        loss = mse_loss(model(inputs), targets.double())
        inputs, targets = next(batches)
        strategy.step(loss, optimizer)


def prefetched_before_the_forward(
    strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> None:
    batches = endless(loader)
    following = next(batches)
    for _ in range(EPOCHS * len(loader)):
        (inputs, targets), following = following, next(batches)
        strategy.step(mse_loss(model(inputs), targets.double()), optimizer)


def collected(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """As transformers' Trainer does with the micro-batches of a step."""
    for _ in range(EPOCHS):
        for inputs, targets in list(loader):
            strategy.step(mse_loss(model(inputs), targets.double()), optimizer)


def forwards_first(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """Several forwards before several backwards."""
    for _ in range(EPOCHS):
        batches = list(loader)
        while batches:
            window, batches = batches[:2], batches[2:]
            losses = [mse_loss(model(inputs), targets.double()) for inputs, targets in window]
            for loss in losses:
                strategy.step(loss, optimizer)


def trained(loop: Loop, backend: str, accumulate: int, samples: int) -> tuple[list[float], dict[str, Any]] | str:
    with prepared(backend, accumulate=accumulate) as (strategy, model, optimizer):
        data = TensorDataset(*(t[:samples] for t in rows().tensors))
        loader = strategy.dataloader(data, global_batch_size=GLOBAL_BATCH)
        try:
            loop(strategy, model, optimizer, loader)
        except UsageError as error:
            return str(error)
        strategy.check_in_sync(model)
        return weights(model), loader.state_dict()


WORLDS = [
    ("ddp", 2, "spawn"),
    ("ddp", 3, "spawn"),
    pytest.param("horovod", 2, "horovodrun", marks=HOROVOD),
]


@pytest.mark.parametrize(("backend", "world_size", "launcher"), WORLDS)
@pytest.mark.parametrize(
    ("loop", "accumulate"),
    [
        (prefetched_after_the_forward, 2),
        (prefetched_before_the_forward, 2),
        (collected, 2),
        (forwards_first, 2),
        *(
            pytest.param(loop, 1, marks=pytest.mark.all("without accumulation"))
            for loop in (prefetched_after_the_forward, prefetched_before_the_forward, collected)
        ),
    ],
)
def test_batches_taken_ahead_are_trained_on_in_their_order(
    loop: Loop, accumulate: int, backend: str, world_size: int, launcher: Literal["spawn", "horovodrun"]
) -> None:
    """On three ranks, and in two micro-batches, one rank has a stand-in each time."""
    expected = trained(plain, "single", accumulate, 2 * GLOBAL_BATCH)[0]
    for found, _ in run_ranks(
        trained, loop, backend, accumulate, 2 * GLOBAL_BATCH, nprocs=world_size, launcher=launcher
    ):
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("loop", [prefetched_after_the_forward, prefetched_before_the_forward, collected])
def test_batches_taken_ahead_that_weigh_differently_are_refused(loop: Loop) -> None:
    for said in run_ranks(trained, loop, "ddp", 1, SAMPLES):
        assert "several batches were taken from loaders before this backward" in said
        assert "pass weight= to step()" in said


def weighted(backend: str) -> list[float]:
    with prepared(backend) as (strategy, model, optimizer):
        batches = endless(strategy.dataloader(rows(), global_batch_size=GLOBAL_BATCH))
        following = next(batches)
        for _ in range(6):
            (inputs, targets), following = following, next(batches)
            strategy.step(mse_loss(model(inputs), targets.double()), optimizer, weight=len(inputs))
        return weights(model)


def test_batches_taken_ahead_may_weigh_differently_if_the_script_says_how_much() -> None:
    expected = weighted("single")
    for found in run_ranks(weighted, "ddp"):
        assert found == pytest.approx(expected, abs=1e-12)


def test_a_batch_that_is_left_out_later_is_not_taken_for_one_taken_ahead() -> None:
    with prepared("single") as (strategy, model, optimizer):
        loader = strategy.dataloader(rows(), global_batch_size=2)
        for number, (inputs, targets) in enumerate(loader):
            if number != 2:
                strategy.step(mse_loss(model(inputs), targets.double()), optimizer)
                assert loader.state_dict()["steps"] == number + 1
            if number == 3:
                break


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_batch_that_is_left_out_first_is_noticed_at_the_end(epochs: int) -> None:
    noticed = pytest.warns(UserWarning, match="a batch more than step")
    with noticed, prepared("single") as (strategy, model, optimizer):
        loader = strategy.dataloader(TensorDataset(*(t[:8] for t in rows().tensors)), global_batch_size=2)
        for _ in range(epochs):
            for number, (inputs, targets) in enumerate(loader):
                if number:
                    strategy.step(mse_loss(model(inputs), targets.double()), optimizer)


def test_a_run_can_be_stopped_again_after_the_last_batch_of_an_epoch_was_taken_ahead() -> None:
    with prepared("single") as (strategy, model, optimizer):
        batches = endless(strategy.dataloader(rows(), global_batch_size=4))
        following = next(batches)
        for step in range(6):
            (inputs, targets), following = following, next(batches)
            assert strategy._step.batches.last_is_open == (step % 3 == 2)
            strategy.step(mse_loss(model(inputs), targets.double()), optimizer)


def test_a_loop_that_trained_on_nothing_is_forgotten() -> None:
    with prepared("single") as (strategy, model, optimizer):
        loader = strategy.dataloader(rows(), global_batch_size=4)
        assert len(list(loader)) == 3
        for inputs, targets in loader:
            strategy.step(mse_loss(model(inputs), targets.double()), optimizer)
            assert loader.state_dict()["consumed"] == 4
            break


def zipped(backend: str, sizes: tuple[int, int], separately: bool) -> list[float] | str:
    """Train on two loaders at once, the sum of their losses or one after the other."""
    data = rows().tensors
    with prepared(backend) as (strategy, model, optimizer):
        first, second = (
            strategy.dataloader(TensorDataset(*(t[:size] for t in data)), global_batch_size=GLOBAL_BATCH)
            for size in sizes
        )
        try:
            for one, two in zip(first, second, strict=False):
                if separately:
                    strategy.backward(mse_loss(model(one[0]), one[1].double()), optimizer)
                    strategy.backward(mse_loss(model(two[0]), two[1].double()), optimizer)
                    strategy.update(optimizer)
                else:
                    losses = [mse_loss(model(inputs), targets.double()) for inputs, targets in (one, two)]
                    strategy.step(torch.stack(losses).sum(), optimizer)
        except UsageError as error:
            return str(error)
        return weights(model)


@pytest.mark.parametrize("sizes", [(8, 8), (11, 11), (8, 11)])
def test_two_loaders_of_equal_shares_train_like_one_process(sizes: tuple[int, int]) -> None:
    """In the last case the third batch of the longer one is not used: ``zip`` takes it, or not, and drops it."""
    expected = zipped("single", sizes, False)
    for found in run_ranks(zipped, "ddp", sizes, False):
        assert found == pytest.approx(expected, abs=1e-12)


def test_two_loaders_of_other_shares_are_refused() -> None:
    for said in run_ranks(zipped, "ddp", (11, 10), False):
        assert "several batches were taken from loaders before this backward" in said


def test_a_run_can_be_stopped_after_an_epoch_whose_batches_were_collected() -> None:
    with prepared("single") as (strategy, model, optimizer):
        loader = strategy.dataloader(rows(), global_batch_size=SAMPLES)
        for inputs, targets in list(loader):  # a single batch: the iteration has ended before it is trained on
            assert strategy._step.batches.last_is_open
            strategy.step(mse_loss(model(inputs), targets.double()), optimizer)
        assert not strategy._step.batches.last_is_open


def test_batches_of_a_dropped_iteration_are_not_looked_for() -> None:
    batches = OpenBatches()
    micro_batch = MicroBatch(0, 1, 1, 1, 0, first=True, last=True, opening=True, everywhere=True)
    dropped, following = Iteration(object()), Iteration(object())
    for iteration in (dropped, dropped):
        batches.take(micro_batch, iteration)
    batches.drop(dropped)
    for iteration in (following, following):
        batches.take(micro_batch, iteration)
    assert batches.of_backward(weighted=False) is micro_batch
    assert following.trained
    assert not dropped.trained


def positions_with_a_resume(folder: Path) -> list[tuple[int, int]]:
    """Return what the ranks compare, after each step of a run that goes back to an earlier one."""
    found = []
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        model = nn.Linear(1, 1)
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = strategy.dataloader(TensorDataset(torch.ones(20, 1)), global_batch_size=4)
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
        for _ in range(2):
            for (x,) in loader:
                strategy.step(model(x).mean(), optimizer)
                found.append(strategy.communicator.collectives.pulse.trained)
                if strategy.global_step == 2:
                    checkpoint.save()
            checkpoint.resume()
    return found


def test_positions_never_go_back(tmp_path: Path) -> None:
    one, other = run_ranks(positions_with_a_resume, tmp_path)
    assert one == other
    assert len(one) == 5 + 3
    for (steps, position), (more_steps, further) in pairwise(one):
        assert more_steps == steps + 1
        assert further > position
