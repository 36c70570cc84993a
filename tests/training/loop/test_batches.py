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
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import unitrain
from unitrain import Strategy, UsageError

SAMPLES, GLOBAL_BATCH = 11, 4  # 4, 4 and 3: the last batch weighs differently on each rank
EPOCHS = 2


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=generator), torch.randn(SAMPLES, 1, generator=generator))


class Run:
    """A strategy, and a prepared model of which each batch has a loss."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        torch.manual_seed(1)
        self.model: nn.Module = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = strategy.prepare(self.model, optimizer)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return mse_loss(self.model(inputs), targets.double())

    def step(self, loss: Tensor, **options: Any) -> None:
        self.strategy.step(loss, self.optimizer, **options)

    def loader(self, global_batch_size: int, samples: int = SAMPLES) -> Any:
        data = TensorDataset(*(t[:samples] for t in rows().tensors))
        return self.strategy.dataloader(data, global_batch_size=global_batch_size)

    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()


@contextmanager
def started(backend: str, **settings: Any) -> Iterator[Run]:
    with unitrain.init(backend=backend, precision="fp64", device="cpu", timeout_s=30, **settings) as strategy:
        yield Run(strategy)


Loop = Callable[[Run, Any], None]


def plain(run: Run, loader: Any) -> None:
    for _ in range(EPOCHS):
        for batch in loader:
            run.step(run.loss(batch))


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def prefetched_after_the_forward(run: Run, loader: Any) -> None:
    """The idiom of nanoGPT."""
    batches = endless(loader)
    batch = next(batches)
    for _ in range(EPOCHS * len(loader)):
        loss = run.loss(batch)
        batch = next(batches)
        run.step(loss)


def prefetched_before_the_forward(run: Run, loader: Any) -> None:
    batches = endless(loader)
    following = next(batches)
    for _ in range(EPOCHS * len(loader)):
        batch, following = following, next(batches)
        run.step(run.loss(batch))


def collected(run: Run, loader: Any) -> None:
    """As transformers' Trainer does with the micro-batches of a step."""
    for _ in range(EPOCHS):
        for batch in list(loader):
            run.step(run.loss(batch))


def forwards_first(run: Run, loader: Any) -> None:
    """Several forwards before several backwards."""
    for _ in range(EPOCHS):
        batches = list(loader)
        while batches:
            window, batches = batches[:2], batches[2:]
            for loss in [run.loss(batch) for batch in window]:
                run.step(loss)


def trained(loop: Loop, backend: str, accumulate: int, samples: int) -> list[float] | str:
    with started(backend, accumulate=accumulate) as run:
        try:
            loop(run, run.loader(GLOBAL_BATCH, samples))
        except UsageError as error:
            return str(error)
        run.strategy.check_in_sync(run.model)
        return run.weights()


WORLDS = [("ddp", 3, "spawn"), pytest.param("horovod", 2, "horovodrun", marks=HOROVOD)]


@pytest.mark.parametrize(("backend", "world_size", "launcher"), WORLDS)
@pytest.mark.parametrize(
    "loop", [prefetched_after_the_forward, prefetched_before_the_forward, collected, forwards_first]
)
def test_batches_taken_ahead_are_trained_on_in_their_order(
    loop: Loop, backend: str, world_size: int, launcher: Literal["spawn", "horovodrun"]
) -> None:
    """On three ranks, and in two micro-batches, one rank has a stand-in each time."""
    expected = trained(plain, "single", 2, 2 * GLOBAL_BATCH)
    for found in run_ranks(trained, loop, backend, 2, 2 * GLOBAL_BATCH, nprocs=world_size, launcher=launcher):
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("loop", [prefetched_after_the_forward, prefetched_before_the_forward, collected])
def test_batches_taken_ahead_that_weigh_differently_are_refused(loop: Loop) -> None:
    for said in run_ranks(trained, loop, "ddp", 1, SAMPLES):
        assert "several batches were taken from loaders before this backward" in said
        assert "pass weight= to step()" in said


def weighted(backend: str) -> list[float]:
    with started(backend) as run:
        batches = endless(run.loader(GLOBAL_BATCH))
        following = next(batches)
        for _ in range(6):
            batch, following = following, next(batches)
            run.step(run.loss(batch), weight=len(batch[0]))
        return run.weights()


def test_batches_taken_ahead_may_weigh_differently_if_the_script_says_how_much() -> None:
    expected = weighted("single")
    for found in run_ranks(weighted, "ddp"):
        assert found == pytest.approx(expected, abs=1e-12)


def test_a_batch_that_is_left_out_later_is_not_taken_for_one_taken_ahead() -> None:
    with started("single") as run:
        loader = run.loader(2)
        for number, batch in enumerate(loader):
            if number != 2:
                run.step(run.loss(batch))
                assert loader.state_dict()["steps"] == number + 1
            if number == 3:
                break


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_batch_that_is_left_out_first_is_noticed_at_the_end(epochs: int) -> None:
    noticed = pytest.warns(UserWarning, match="a batch more than step")
    with noticed, started("single") as run:
        loader = run.loader(2, samples=8)
        for _ in range(epochs):
            for number, batch in enumerate(loader):
                if number:
                    run.step(run.loss(batch))


def test_a_run_can_be_stopped_again_after_the_last_batch_of_an_epoch_was_taken_ahead() -> None:
    with started("single") as run:
        batches = endless(run.loader(4))
        following = next(batches)
        for step in range(6):
            batch, following = following, next(batches)
            assert run.strategy._step.batches.last_is_open == (step % 3 == 2)
            run.step(run.loss(batch))


def test_a_run_can_be_stopped_after_an_epoch_whose_batches_were_collected() -> None:
    with started("single") as run:
        for batch in list(run.loader(SAMPLES)):  # a single one: the iteration has ended before it is trained on
            assert run.strategy._step.batches.last_is_open
            run.step(run.loss(batch))
        assert not run.strategy._step.batches.last_is_open


def test_a_loop_that_trained_on_nothing_is_forgotten() -> None:
    with started("single") as run:
        loader = run.loader(4)
        assert len(list(loader)) == 3
        for batch in loader:
            run.step(run.loss(batch))
            assert loader.state_dict()["consumed"] == 4
            break


def zipped(backend: str, sizes: tuple[int, int]) -> list[float] | str:
    """Train on the sum of the losses of two loaders at once."""
    with started(backend) as run:
        try:
            for batches in zip(*(run.loader(GLOBAL_BATCH, size) for size in sizes), strict=False):
                run.step(torch.stack([run.loss(batch) for batch in batches]).sum())
        except UsageError as error:
            return str(error)
        return run.weights()


@pytest.mark.parametrize("sizes", [(8, 8), (11, 11), (8, 11)])
def test_two_loaders_of_equal_shares_train_like_one_process(sizes: tuple[int, int]) -> None:
    """In the last case the third batch of the longer one is not used: ``zip`` takes it, or not, and drops it."""
    expected = zipped("single", sizes)
    for found in run_ranks(zipped, "ddp", sizes):
        assert found == pytest.approx(expected, abs=1e-12)


def test_two_loaders_of_other_shares_are_refused() -> None:
    for said in run_ranks(zipped, "ddp", (11, 10)):
        assert "several batches were taken from loaders before this backward" in said


def positions_with_a_resume(folder: Path) -> list[tuple[int, int]]:
    """Return what the ranks compare, after each step of a run that goes back to an earlier one."""
    found = []
    with unitrain.init(backend="ddp", device="cpu") as strategy:
        model, optimizer = strategy.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
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
