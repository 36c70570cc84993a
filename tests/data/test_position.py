"""Each sample is read exactly once, in global batches independent of the world, also after a resume."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretended import in_training, pretended_rank, trained
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, WeightedRandomSampler

import unitrain
from unitrain import CheckpointError, UsageError
from unitrain.data import Loader


class Numbers(Dataset[Tensor]):
    """Sample i is i; what was read is noted."""

    fingerprint = "numbers"  # otherwise, the ranks read some samples for a comparison

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return torch.tensor(index)


class Buckets:
    """A batch sampler whose batches differ in size."""

    def __init__(self, length: int, most: int) -> None:
        self.length, self.most = length, most

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.length).tolist()
        while order:
            size = int(torch.randint(1, self.most + 1, ()))
            yield order[:size]
            order = order[size:]


@dataclass(frozen=True)
class Case:
    """A run, but for the number of ranks."""

    length: int
    batch: int
    accumulate: int
    seed: int
    epoch: int
    order: str
    drop_last: bool

    def loader(self, rank: int = 0, world_size: int = 1) -> Loader:
        strategy = pretended_rank(rank, world_size, accumulate=self.accumulate, seed=self.seed)
        data = Numbers(self.length)
        if self.order == "buckets":
            loader = strategy.dataloader(data, batch_sampler=Buckets(self.length, self.batch))
        else:
            sampler = None
            if self.order == "weighted":
                sampler = WeightedRandomSampler([1.0] * self.length, self.length, replacement=False)
            loader = strategy.dataloader(
                data,
                global_batch_size=self.batch,
                shuffle=self.order == "shuffled",
                sampler=sampler,
                drop_last=self.drop_last,
            )
        loader.epoch = self.epoch
        return loader


@dataclass(frozen=True)
class Part:
    """What the ranks of a world were handed out: for each micro-batch its samples, and whether it ended a window."""

    micro_batches: list[tuple[list[int], bool]]
    state: dict[str, Any]


def play(case: Case, world_size: int, state: dict[str, Any] | None, stop: int | None) -> Part:
    """Iterate over ``stop`` micro-batches (None: all) of an epoch on every rank of a world."""
    ranks = []
    states = []
    for rank in range(world_size):
        loader = case.loader(rank, world_size)
        if state is not None:
            loader.load_state_dict(state)
            assert loader.epoch == state["epoch"]
        whole_epoch = len(loader)
        mine = []
        for batch in trained(loader, stop):
            micro_batch = in_training(loader)
            assert len(batch) == max(1, micro_batch.count)
            mine.append((batch.tolist()[: micro_batch.count], micro_batch.window, micro_batch.last))
        assert stop is not None or state is not None or len(mine) == whole_epoch
        assert len(loader.dataset.read) == len(set(loader.dataset.read)), "a sample was read twice"
        ranks.append(mine)
        states.append(loader.state_dict())
    assert all(other == states[0] for other in states)
    assert len({len(mine) for mine in ranks}) == 1, "every rank has as many batches"
    together = []
    for parts in zip(*ranks, strict=True):
        samples = [part[0] for part in parts]
        # Rank r has every world-th sample from the r-th on.
        whole = [samples[i % world_size][i // world_size] for i in range(sum(map(len, samples)))]
        together.append((whole, parts[0][2]))
        assert len({part[1:] for part in parts}) == 1
    return Part(together, states[0])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    accumulate = draw(st.integers(1, 4))
    batch = draw(st.integers(accumulate, 40))
    return Case(
        length=draw(st.integers(batch, 150)),
        batch=batch,
        accumulate=accumulate,
        seed=draw(st.integers(0, 2**32 - 1)),
        epoch=draw(st.integers(0, 50)),
        order=draw(st.sampled_from(["plain", "shuffled", "shuffled", "weighted", "buckets"])),
        drop_last=draw(st.booleans()),
    )


worlds = st.integers(1, 17)


@given(cases(), worlds, worlds, st.floats(0, 1))
def test_each_sample_comes_exactly_once_in_the_same_global_batches(
    case: Case, before: int, after: int, resumed_at: float
) -> None:
    alone = play(case, 1, None, None).micro_batches
    seen = [sample for samples, _ in alone for sample in samples]
    dropped = case.length % case.batch if case.drop_last and case.order != "buckets" else 0
    assert len(seen) == len(set(seen)) == case.length - dropped

    stop = int(resumed_at * len(alone))
    first = play(case, before, None, stop)
    assert first.micro_batches == alone[:stop]
    # A window that was not handed out to its end is not consumed.
    consumed = max((i + 1 for i, (_, last) in enumerate(first.micro_batches) if last), default=0)
    assert first.state["consumed"] == sum(len(samples) for samples, _ in alone[:consumed])

    rest = play(case, after, first.state, None)
    assert rest.micro_batches == alone[consumed:]
    assert (rest.state["epoch"], rest.state["consumed"]) == (case.epoch + 1, 0)


@given(cases().filter(lambda case: case.order != "buckets"), worlds, st.integers(1, 60))
def test_another_batch_size_still_reads_each_sample_once(case: Case, world_size: int, batch: int) -> None:
    first = play(case, world_size, None, case.accumulate)
    other = Case(**{**vars(case), "batch": max(batch, case.accumulate), "drop_last": False})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest = play(other, world_size, first.state, None)
    changed = other.batch != case.batch
    assert [str(one.message) for one in caught if "global batch size was" in str(one.message)] != [] or not changed
    seen = [sample for samples, _ in first.micro_batches + rest.micro_batches for sample in samples]
    assert sorted(seen) == list(range(case.length))


def plain_loader(length: int = 20, **given: Any) -> Loader:
    return pretended_rank().dataloader(Numbers(length), **{"global_batch_size": 4, "shuffle": True, **given})


def values(loader: Loader, count: int | None = None) -> list[int]:
    return [sample for batch in trained(loader, count) for sample in batch.tolist()]


def test_batches_that_workers_have_only_prefetched_are_not_consumed() -> None:
    loader = plain_loader(num_workers=2, prefetch_factor=2)
    values(loader, 1)
    assert loader.state_dict()["consumed"] == 4
    other = plain_loader()
    other.load_state_dict(loader.state_dict())
    assert values(other) == values(plain_loader())[4:]


def test_a_loop_that_does_not_ask_for_the_resumed_epoch_is_warned_of() -> None:
    """``for epoch in range(3)`` would train the epochs before again."""
    loader = plain_loader()
    state = {**loader.state_dict(), "epoch": 1}
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"resumed in epoch 1, .* Write `for epoch in loader\.epochs\(total\)`"):
        values(loader)
    values(loader)  # says it once
    loader.load_state_dict(state)
    assert [len(values(loader)) for _ in loader.epochs(3)] == [20, 20]


def test_a_script_that_counts_the_epochs_of_a_loader_may_go_round_another(recwarn: pytest.WarningsRecorder) -> None:
    with unitrain.init(backend="single", device="cpu") as strategy:
        train, noise = (strategy.dataloader(torch.ones(8, 1), global_batch_size=4) for _ in range(2))
        for loader in (train, noise):
            loader.load_state_dict({**loader.state_dict(), "epoch": 1})
        rows = itertools.chain.from_iterable(itertools.repeat(noise))
        assert [len(batch) + len(next(rows)) for _ in train.epochs(3) for batch in train] == [8] * 4
    assert not [str(warning.message) for warning in recwarn if "resumed in epoch" in str(warning.message)]


def test_a_state_after_the_last_batch_leaves_the_epoch_to_be_closed() -> None:
    """What a script does at the end of an epoch, evaluate say, has not been done then."""
    loader = plain_loader()
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 20)
    other = plain_loader()
    other.load_state_dict(state)
    read = {epoch: len(values(other)) for epoch in other.epochs(2)}
    assert read == {0: 0, 1: 20}


def test_an_iteration_that_was_broken_off_is_followed_by_the_next_epoch() -> None:
    loader, whole = plain_loader(), plain_loader()
    values(loader, 1)
    assert loader.epoch == 0
    whole.epoch = 1
    assert values(loader) == values(whole)
    read = []
    for _ in loader.epochs(5):
        read.append(loader.epoch)
        values(loader, 1)
    assert read == [2, 3, 4]
    assert list(loader.epochs(5)) == []


def test_epochs_that_are_not_iterated_are_passed_over() -> None:
    loader, whole = plain_loader(), plain_loader()
    whole.epoch = 2
    read = [values(loader) for epoch in loader.epochs(3) if epoch == 2]
    assert read == [values(whole)]


def test_two_iterations_at_once_are_refused() -> None:
    loader = plain_loader()
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(UsageError, match="supports one at a time"):
        next(first)


def test_training_goes_on_after_a_state_was_loaded_within_a_window() -> None:
    strategy = unitrain.init(backend="single", accumulate=2)
    model, optimizer = strategy.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    loader = strategy.dataloader(TensorDataset(torch.randn(12, 1)), global_batch_size=4)
    saved = None
    for i, (inputs,) in enumerate(loader):
        strategy.step(model(inputs).mean(), optimizer)
        if i == 1:
            saved = loader.state_dict()
        if i == 2:
            break
    assert saved is not None
    loader.load_state_dict(saved)
    stepped = [strategy.step(model(inputs).mean(), optimizer).stepped for (inputs,) in loader]
    assert stepped == [False, True, False, True]


def test_a_dataset_of_another_length_is_refused() -> None:
    with pytest.raises(CheckpointError, match="its length is 20, but this one's is 21"):
        plain_loader(21).load_state_dict(plain_loader(20).state_dict())


def test_other_data_of_the_same_length_are_refused() -> None:
    def loader(data: Tensor) -> Loader:
        return pretended_rank().dataloader(TensorDataset(data), global_batch_size=4)

    state = loader(torch.arange(20)).state_dict()
    loader(torch.arange(20)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="fingerprint"):
        loader(torch.arange(20).flip(0)).load_state_dict(state)


def test_a_position_that_the_batch_sampler_no_longer_has_is_refused() -> None:
    def loader(most: int) -> Loader:
        return pretended_rank().dataloader(Numbers(20), batch_sampler=[[*range(most)], [*range(most, 20)]])

    state = {**loader(5).state_dict(), "consumed": 5}
    loader(5).load_state_dict(state)
    with pytest.raises(CheckpointError, match="can't continue after 5 samples"):
        loader(6).load_state_dict(state)


def test_the_order_goes_on_by_the_seed_of_the_state() -> None:
    state = {**plain_loader().state_dict(), "consumed": 8}
    loader = pretended_rank(seed=5).dataloader(Numbers(20), global_batch_size=4, shuffle=True)
    with pytest.warns(UserWarning, match=r"saved run's seed 0, although the seed of this run is 5"):
        loader.load_state_dict(state)
    assert values(loader) == values(plain_loader())[8:]
    assert loader.state_dict()["seed"] == 0


def test_only_rank_0_warns() -> None:
    loader = pretended_rank(1, 2, seed=5).dataloader(Numbers(20), global_batch_size=4)
    loader.load_state_dict(plain_loader().state_dict())  # a warning would be an error


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_billion_samples_start_and_continue_without_a_list_of_them(shuffle: bool) -> None:
    strategy = pretended_rank(5, 8)
    loader = strategy.dataloader(Numbers(10**9), global_batch_size=1000, shuffle=shuffle)
    loader.load_state_dict({**loader.state_dict(), "consumed": 999_999_000})
    (batch,) = loader
    assert len(batch) == 125
    assert (len(loader), loader.steps_per_epoch) == (10**6, 10**6)
    loader.epoch = 3
    first = next(iter(loader))
    assert (first.tolist() == list(range(5, 1000, 8))) != shuffle
