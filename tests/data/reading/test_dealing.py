"""Sharded datasets have the same global batches on any ranks and workers, also after a resume on others."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pretended import in_training, pretended_rank, trained
from streams import Shards, StatefulShards
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import WorkerInfo

from unitrain import CheckpointError, ConfigError
from unitrain.communication.counts import CountReduction
from unitrain.data import Loader
from unitrain.data.reading import iterable
from unitrain.data.reading.dealing import as_worker
from unitrain.data.reading.iterable import Iterable


@dataclass(frozen=True)
class World:
    """Ranks, each with workers, that read a dataset in this process, one at a time."""

    ranks: int
    workers: int

    def play(self, read: Callable[[int], Any]) -> list[Any]:
        """Return ``read(rank)`` of every rank."""
        found: dict[int, Any] = {}
        sums: dict[int, list[list[int]]] = {}
        baton = threading.Condition()  # a rank hands it on where it would wait for the others

        def summed(reduction: CountReduction, values: list[int]) -> Callable[[], list[int]]:
            rank = reduction._collectives.rank
            number = sum(rank in asked for asked in askers.values())
            askers.setdefault(number, set()).add(rank)
            sums.setdefault(number, []).append(values)
            baton.notify_all()

            def waited() -> list[int]:
                assert baton.wait_for(lambda: len(sums[number]) == self.ranks or errors, 20)
                assert not errors, errors
                return [sum(column) for column in zip(*sums[number], strict=True)]

            return waited

        def as_workers(loader: DataLoader[Any]) -> Iterator[Any]:
            stream: Any = loader.dataset
            numbers = range(max(1, self.workers))
            infos = [WorkerInfo(id=i, num_workers=len(numbers), seed=0, dataset=stream) for i in numbers]
            readers = [(info, iter(stream)) for info in infos]
            while readers:  # as a DataLoader asks them
                for info, reader in list(readers):
                    with as_worker(info):
                        piece = next(reader, self)
                    if piece is self:
                        readers.remove((info, reader))
                    else:
                        yield piece

        def run(rank: int) -> None:
            with baton:
                try:
                    found[rank] = read(rank)
                except BaseException as error:
                    errors.append(error)
                    baton.notify_all()

        askers: dict[int, set[int]] = {}
        errors: list[BaseException] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CountReduction, "start", summed)
            patch.setattr(Iterable, "_compared", lambda self, pieces: pieces)
            patch.setattr(iterable, "with_deaths_explained", as_workers)
            threads = [threading.Thread(target=run, args=[rank]) for rank in range(self.ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        if errors:
            raise errors[0]
        return [found[rank] for rank in range(self.ranks)]


@dataclass(frozen=True)
class Case:
    """A run, but for its ranks and workers."""

    sizes: tuple[int, ...]
    batch: int
    accumulate: int
    shards: tuple[int, int]
    drop_last: bool
    stateful: bool

    def loader(self, rank: int, world: World, read: list[int]) -> Loader:
        data = StatefulShards(list(self.sizes), read=read) if self.stateful else Shards(list(self.sizes))
        strategy = pretended_rank(rank, world.ranks, accumulate=self.accumulate)
        return strategy.dataloader(
            data,
            global_batch_size=self.batch,
            shards=self.shards,
            drop_last=self.drop_last,
            num_workers=min(world.workers, 2),  # DataLoader warns of more than the cores; ``World`` has them all
        )

    def play(self, world: World, state: dict[str, Any] | None = None, stop: int | None = None) -> Part:
        """Iterate over ``stop`` windows (None: all) of an epoch."""
        everything: list[int] = []
        if state is not None and state["epoch"]:
            return Part([], state, [])  # was at the end

        def read(rank: int) -> tuple[list[tuple[int, list[int]]], dict[str, Any]]:
            loader = self.loader(rank, world, everything)
            if state is not None:
                loader.load_state_dict(state)
            mine: list[tuple[int, list[int]]] = []
            windows = 0
            if stop != 0:
                for batch in trained(loader):
                    micro_batch = in_training(loader)
                    assert len(batch) == max(1, micro_batch.count)
                    mine.append((micro_batch.step, batch.tolist()[: micro_batch.count]))
                    windows += micro_batch.last
                    if windows == stop:
                        break
            return mine, loader.state_dict()

        parts = world.play(read)
        assert len({len(mine) for mine, _ in parts}) == 1, "every rank has as many batches"
        steps: dict[int, list[int]] = {}
        for mine, _ in parts:
            for step, samples in mine:
                steps.setdefault(step, []).extend(samples)
        states = [{**state, "seeks": None} for _, state in parts]
        assert all(other == states[0] for other in states)
        seeks = [state["seeks"] for _, state in parts if "seeks" in state]  # as a checkpoint merges them
        of_kinds = list(zip(*(its[1:] for its in seeks), strict=True))
        shards = [[one for of_rank in kind for one in of_rank] for kind in of_kinds]
        merged = {"seeks": [seeks[0][0], *shards]} if seeks else {}
        return Part([sorted(samples) for _, samples in sorted(steps.items())], {**states[0], **merged}, everything)


@dataclass(frozen=True)
class Part:
    """The samples of each step, the state after them, and every sample that was read."""

    steps: list[list[int]]
    state: dict[str, Any]
    read: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    parts, groups = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    sizes = [draw(st.integers(1, 14)) for _ in range(parts)]  # each rank has samples
    sizes += draw(st.lists(st.integers(0, 14), max_size=8))
    batch = draw(st.integers(parts, 20))
    accumulate = draw(st.integers(1, min(3, batch)))
    return Case(tuple(sizes), batch, accumulate, (parts, groups), draw(st.booleans()), draw(st.booleans()))


worlds = st.builds(World, st.integers(1, 6), st.integers(0, 4))


@given(cases(), worlds, worlds, st.floats(0, 1))
def test_global_batches_are_the_same_on_any_ranks_and_workers_and_after_a_resume_on_others(
    case: Case, before: World, after: World, resumed_at: float
) -> None:
    alone = case.play(World(1, 0)).steps
    samples = sorted(sample for step in alone for sample in step)
    assert samples == Shards(list(case.sizes)).samples() or (case.drop_last and len(samples) == len(set(samples)))
    assert not case.drop_last or all(len(step) == case.batch for step in alone)
    stop = int(resumed_at * len(alone))
    first = case.play(before, stop=stop)
    assert first.steps == alone[:stop]
    rest = case.play(after, first.state)
    assert rest.steps == alone[stop:]
    assert (rest.state["epoch"], rest.state["consumed"]) == (1, 0)


@given(cases(), worlds, worlds, st.integers(0, 20))
def test_another_global_batch_still_reads_each_sample_once(case: Case, before: World, after: World, more: int) -> None:
    case = replace(case, drop_last=False)
    other = replace(case, batch=case.shards[0] + more, accumulate=1)
    first = case.play(before, stop=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second = other.play(after, first.state, stop=1)
        third = case.play(before, second.state)
    samples = [sample for part in (first, second, third) for step in part.steps for sample in step]
    assert sorted(samples) == Shards(list(case.sizes)).samples()


def test_a_shard_that_has_ended_is_not_read_again() -> None:
    """Its state would begin anew, as that of many datasets does."""
    case = Case((1, 9), 4, 1, (2, 1), drop_last=False, stateful=True)
    first = case.play(World(2, 0), stop=2)
    assert first.state["seeks"][:2] == [0, [[0, 0, 0, None], [1, 0, 1, {"position": 4}]]]
    assert case.play(World(1, 0), first.state).read == [104, 105, 106, 107, 108]


def test_by_default_the_shards_are_those_of_the_ranks_and_workers() -> None:
    case = Case((5, 5, 5, 5, 5, 5), 6, 1, (3, 2), False, False)
    loader = pretended_rank(1, 3).dataloader(Shards([5] * 6), batch_size=2, num_workers=2)
    assert loader.state_dict()["readers"] == case.loader(0, World(1, 0), []).state_dict()["readers"] == [3, 2, 6, []]


def test_what_can_not_be_dealt_out_is_refused() -> None:
    strategy = pretended_rank()
    for data, options, message in (
        (Shards([9]), {"shards": (0, 1)}, "must be two positive ints"),
        (Shards([9]), {"shards": (4, 1)}, "3 samples can't be made of 4 shards"),
        (Shards([9]), {"shards": (1, 1), "sharded": False}, "shards is not for this Shards"),
        ([1, 2, 3], {"shards": (1, 1)}, "shards are for iterable datasets only"),
        (iter_only([9]), {"shards": (1, 1), "sharded": True}, "shards is not for this Plain: only"),
    ):
        with pytest.raises(ConfigError, match=message):
            strategy.dataloader(data, batch_size=3, **options)
    loader = strategy.dataloader(Shards([9]), batch_size=4, shards=(4, 1))
    list(trained(loader, 1))
    other = strategy.dataloader(Shards([9]), batch_size=3)
    with warnings.catch_warnings(), pytest.raises(CheckpointError, match="3 samples can't be made of 4 shards"):
        other.load_state_dict(loader.state_dict())
    whole = strategy.dataloader(Shards([9]), batch_size=4, sharded=False)
    with pytest.raises(CheckpointError, match="sharded in another way"):
        whole.load_state_dict(loader.state_dict())


def iter_only(sizes: list[int]) -> Any:
    class Plain:
        def __iter__(self) -> Iterator[Any]:
            return iter(Shards(sizes))

    return Plain()
