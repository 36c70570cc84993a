"""Which batch a loss is of, in scripts that take batches ahead, or from two loaders."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from pretended import pretended_rank
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import unitrain
from unitrain import Strategy, UsageError
from unitrain.testing.models import step_by_hand
from unitrain.training.windows.weights import Losses

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

    def step(self, loss: Tensor | list[Tensor], **options: Any) -> None:
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


WORLDS = [("ddp", 3), pytest.param("horovod", 2, marks=HOROVOD)]


@pytest.mark.parametrize(("backend", "world_size"), WORLDS)
@pytest.mark.parametrize(
    "loop", [prefetched_after_the_forward, prefetched_before_the_forward, collected, forwards_first]
)
def test_batches_taken_ahead_are_trained_on_in_their_order(loop: Loop, backend: str, world_size: int) -> None:
    """On three ranks, and in two micro-batches, one rank has a stand-in each time."""
    expected = trained(plain, "single", 2, 2 * GLOBAL_BATCH)
    for found in run_ranks(trained, loop, backend, 2, 2 * GLOBAL_BATCH, nprocs=world_size):
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("loop", [prefetched_after_the_forward, prefetched_before_the_forward, collected])
def test_batches_taken_ahead_that_weigh_differently_are_refused(loop: Loop) -> None:
    for said in run_ranks(trained, loop, "ddp", 1, SAMPLES):
        assert "several batches were taken from loaders before this backward" in said
        assert "step(loss, optimizer, batch=batch)" in said


def given(run: Run, loader: Any) -> None:
    """Take batches ahead, and pass them: both parts of them, or one."""
    batches = endless(loader)
    batch = next(batches)
    for number in range(EPOCHS * len(loader)):
        loss = run.loss(batch)
        earlier, batch = batch, next(batches)
        run.step(loss, batch=earlier if number % 2 else earlier[1])


def test_batches_taken_ahead_may_weigh_differently_if_the_script_passes_them() -> None:
    expected = trained(plain, "single", 1, SAMPLES)
    for found in run_ranks(trained, given, "ddp", 1, SAMPLES):
        assert found == pytest.approx(expected, abs=1e-12)


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


CRITICS = 2


class Pair:
    """A model trained by 12 rows in even batches, and a critic by 9 rows in batches of 6 and 3, twice as often."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.model: nn.Module = nn.Linear(3, 1, dtype=torch.float64)
        self.critic: nn.Module = nn.Linear(3, 1, dtype=torch.float64)
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.5) for part in (self.model, self.critic)]

    def weights(self) -> list[float]:
        return [
            v for part in (self.model, self.critic) for p in part.parameters() for v in p.detach().flatten().tolist()
        ]


def half_rows(samples: int, seed: int) -> TensorDataset:
    return TensorDataset(
        *torch.randn(2, samples, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )


def mean_error(module: nn.Module, batch: Any) -> Tensor:
    return mse_loss(module(batch[0]), batch[1][:, :1])


def critics_by_hand() -> list[float]:
    pair = Pair()
    noise = endless(DataLoader(half_rows(9, 6), batch_size=6))
    for _ in range(EPOCHS):
        for batch in DataLoader(half_rows(12, 5), batch_size=6):
            for _ in range(CRITICS):
                step_by_hand(mean_error(pair.critic, next(noise)), pair.optimizers[1])
            step_by_hand(mean_error(pair.model, batch), pair.optimizers[0])
    return pair.weights()


def critics(backend: str, passed: bool, ahead: bool) -> list[float] | str:
    """Take a batch, train on others, then on it. With ``ahead``, the next of the others is taken before that."""
    pair = Pair()
    settings: Any = {"backend": backend, "precision": "fp64", "device": "cpu", "timeout_s": 30}
    with warnings.catch_warnings(), unitrain.init(**settings) as strategy:
        warnings.filterwarnings("error", "the loss is a mean over")  # which depends on the batch
        optimizer, critic_optimizer = pair.optimizers
        model, critic = strategy.prepare(pair.model, pair.critic, optimizer, critic_optimizer)[:2]
        train = strategy.dataloader(half_rows(12, 5), global_batch_size=6)
        noise = endless(strategy.dataloader(half_rows(9, 6), global_batch_size=6))
        other = next(noise) if ahead else None
        try:
            for _ in range(EPOCHS):
                for batch in train:
                    for _ in range(CRITICS):
                        other = other or next(noise)
                        strategy.step(mean_error(critic, other), critic_optimizer, batch=other if passed else None)
                        other = next(noise) if ahead else None
                    strategy.step(mean_error(model, batch), optimizer, batch=batch if passed else None)
        except UsageError as error:
            return str(error)
        pair.model, pair.critic = strategy.export(model), strategy.export(critic)
        return pair.weights()


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=HOROVOD), "fsdp"])
def test_a_batch_that_is_passed_has_its_weight_after_steps_on_others(backend: str) -> None:
    expected = critics_by_hand()
    for found in run_ranks(critics, backend, True, False):
        assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_is_asked_for_where_others_were_trained_on(ahead: bool) -> None:
    for said in run_ranks(critics, "ddp", False, ahead):
        assert "it is not clear which one the loss is of" in said
        assert "2 of 3" in said or "1 of 3" in said


def in_pairs(zipping: Callable[..., Any], backend: str) -> list[float]:
    """Train on a loss for each of two loaders. At the end of the first, a rank has a stand-in."""
    with started(backend) as run:
        first, second = run.loader(2, 5), run.loader(GLOBAL_BATCH, 8)
        for batches in zipping(first, second):
            counts = [len(batch[0]) for batch in batches]
            run.step([run.loss(batch) for batch in batches], weight=counts, batch=batches)
        return run.weights()


def zip_cycled(first: Any, second: Any) -> Any:
    return zip(first, cycle(second), strict=False)


def zip_twice(first: Any, second: Any) -> Any:
    """Yield pairs of two loaders, of which the second is iterated over anew."""
    return zip(first, endless(second), strict=False)


@pytest.mark.parametrize("zipping", [zip_cycled, zip_twice])
def test_each_of_several_losses_has_the_weight_of_the_batch_that_is_passed(zipping: Any) -> None:
    expected = in_pairs(zipping, "single")
    assert len(expected) == 4
    for found in run_ranks(in_pairs, zipping, "ddp"):
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("zipping", [zip_cycled, zip_twice])
@pytest.mark.parametrize("how", ["weights", "sum"])
def test_losses_of_a_stand_in_and_of_another_batch_need_their_batches(how: str, zipping: Any) -> None:
    """Also where another loader has ended, and its batches are still in use."""
    rank = pretended_rank(1, 2)
    first, second = (rank.dataloader(torch.arange(float(n)), global_batch_size=size) for n, size in ((5, 2), (8, 4)))
    loss = torch.ones((), requires_grad=True)
    pairs = zipping(first, second)
    for _ in range(2):
        rank.loop._batches.of_backward(Losses([loss, loss], [1, 2], next(pairs)))
    batches = next(pairs)
    losses = Losses([loss, loss], [1, 2]) if how == "weights" else Losses(loss, batch=batches)
    with pytest.raises(UsageError, match="it is not clear which one the loss is of: 0 of 1 samples"):
        rank.loop._batches.of_backward(losses)


def test_a_batch_that_no_loader_has_yielded_is_refused() -> None:
    with started("single") as run:
        for inputs, targets in run.loader(4):
            with pytest.raises(UsageError, match="batch= is not a batch that a loader of this strategy has yielded"):
                run.step(run.loss((inputs, targets)), batch=inputs.clone())
            run.step(run.loss((inputs, targets)), batch=targets)
        assert run.strategy.global_step == 3


def test_the_last_batch_of_an_epoch_is_not_kept_in_memory() -> None:
    with started("single") as run:
        for batch in run.loader(4):
            run.step(run.loss(batch))
        kept = weakref.ref(batch[0])
        del batch
        assert kept() is None


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
