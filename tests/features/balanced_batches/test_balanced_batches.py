"""Batches that are balanced by what samples cost: each sample once, whatever the ranks, and no long waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray
from pretended import pretended_rank, trained
from ranks import run_ranks
from streams import Numbers, Shards, of_workers
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import unitrain
from unitrain import ConfigError, DataError, UsageError
from unitrain.data.order.sharding import BatchPlan, EpochPlan
from unitrain.features.balanced_batches import BalancedBatches
from unitrain.features.balanced_batches.balance import Balance

LISTS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def parts_of(
    lengths: Sequence[float], shares: Sequence[int], cuts: int = 1, most: float | None = None
) -> list[list[NDArray[np.int64]]]:
    return Balance(np.array(lengths, float).__getitem__, most).parts(np.arange(len(lengths)), 0, cuts, shares)


def padded(costs: Sequence[float], part: Any) -> float:
    return len(part) * max((costs[i] for i in part), default=0)


@given(LISTS, st.integers(1, 5), st.integers(1, 4))
def test_each_sample_is_in_one_part(lengths: list[int], ranks: int, cuts: int) -> None:
    parts = parts_of(lengths, (1,) * ranks, cuts)
    assert {len(of_ranks) for of_ranks in parts} == {ranks}
    assert sorted(i for of_ranks in parts for part in of_ranks for i in part) == list(range(len(lengths)))
    if len(lengths) >= ranks * cuts:
        assert all(len(part) for of_ranks in parts for part in of_ranks)


@given(LISTS, st.integers(1, 4), st.integers(0, 60))
def test_no_part_costs_more_than_the_most(lengths: list[int], ranks: int, more: int) -> None:
    most = max(lengths) + more
    parts = parts_of(lengths, (1,) * ranks, most=most)
    assert sorted(i for of_ranks in parts for part in of_ranks for i in part) == list(range(len(lengths)))
    assert all(padded(lengths, part) <= most for of_ranks in parts for part in of_ranks)
    assert all(any(len(part) for part in of_ranks) for of_ranks in parts), "no micro-batch is empty"


@given(st.lists(st.integers(1, 50), min_size=3, max_size=9))
def test_no_other_cut_has_a_lower_padded_cost(lengths: list[int]) -> None:
    [parts] = parts_of(lengths, (1, 1, 1))
    falling = sorted(lengths, reverse=True)
    cuts = combinations(range(1, len(lengths)), 2)
    best = min(max(i * falling[0], (j - i) * falling[i], (len(falling) - j) * falling[j]) for i, j in cuts)
    assert max(padded(lengths, part) for part in parts) == best


def test_shares_are_kept_by_cost() -> None:
    [parts] = parts_of([1] * 16, (3, 1))
    assert list(map(len, parts)) == [12, 4]


def test_a_window_with_fewer_samples_than_parts_has_as_many_micro_batches_as_it_says() -> None:
    balance = Balance(np.arange(1.0, 8.0).__getitem__)
    for plan in (
        EpochPlan(samples=7, global_batch=3, accumulate=2, rank=0, world_size=4, drop_last=False, division=balance),
        BatchPlan(sizes=(3, 3, 1), accumulate=2, rank=0, world_size=4, division=balance),
    ):
        assert len(list(plan)) == plan.micro_batches == 3


LENGTHS = [1 + 7 * i % 19 for i in range(30)]


def loader_of(rank: int = 0, world_size: int = 1, accumulate: int = 1, **given: Any) -> Any:
    strategy = pretended_rank(rank, world_size, accumulate=accumulate)
    order = {} if "batch_sampler" in given else {"global_batch_size": 8, "shuffle": True}
    return strategy.dataloader(TensorDataset(torch.arange(30)), **order, **batched({"lengths": LENGTHS, **given}))


def batched(given: dict[str, Any]) -> dict[str, Any]:
    """Return options of a loader, with those of balanced batches as its batching if any is given."""
    options = {name: given[name] for name in ("lengths", "max_cost") if name in given}
    others = {name: value for name, value in given.items() if name not in options}
    return {**others, "batching": BalancedBatches(**options)} if any(options.values()) else others


def steps_of(batches: Any, loader: Any) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for (rows,) in batches:
        if not loader.stand_in:
            found.setdefault(loader._iteration.micro_batch.step, []).extend(rows.tolist())
    return list(found.values())


BATCHES = [list(range(8)), list(range(8, 17)), list(range(17, 23)), list(range(23, 30))]


@pytest.mark.parametrize(
    "given", [{}, {"max_cost": 40.0}, {"lengths": lambda i: LENGTHS[i]}, {"batch_sampler": BATCHES}]
)
def test_global_batches_do_not_change_and_a_resume_is_on_any_ranks(given: dict[str, Any]) -> None:
    plain = loader_of(**{**given, "lengths": None, "max_cost": None})
    expected = [sorted(step) for step in steps_of(plain, plain)]
    one = loader_of(**given)
    assert [sorted(step) for step in steps_of(one, one)] == expected
    first = loader_of(**given)
    begun = sum(1 for one in first._source.plan(0, 0) if one.step < 2)
    list(trained(first, begun))
    rest: list[list[int]] = [[], []]
    for rank in range(3):
        resumed = loader_of(rank, 3, accumulate=1 if "max_cost" in given else 2, **given)
        resumed.load_state_dict(first.state_dict())
        for window, rows in zip(rest, steps_of(resumed, resumed), strict=True):
            window += rows
    assert [sorted(window) for window in rest] == expected[2:]


def length_of(sample: Tensor) -> int:
    return LENGTHS[int(sample) % 30]


@pytest.mark.parametrize(
    ("data", "given", "error", "message"),
    [
        (Numbers(9), {"lengths": LENGTHS}, ConfigError, r"lengths of an iterable dataset must be a function"),
        (Shards([9]), {"lengths": length_of}, ConfigError, r"a sharded Shards can't be divided .*: pass sharded=False"),
        (Numbers(9), {"lengths": torch.Tensor.item}, DataError, r"lengths must be positive numbers, but go from 0\.0"),
        (Numbers(9), {"lengths": length_of, "max_cost": 18}, DataError, r"sample 8 costs 19, .* more than max_cost=18"),
    ],
)  # fmt: skip
def test_streams_that_can_not_be_balanced(
    data: Any, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        list(pretended_rank().dataloader(data, global_batch_size=8, batching=BalancedBatches(**given)))


class Countable(Numbers):
    def __len__(self) -> int:
        return self.length


def test_the_number_of_batches_of_a_stream_is_unknown_if_it_depends_on_costs() -> None:
    by_length = BalancedBatches(lengths=length_of)
    loader = pretended_rank(accumulate=2).dataloader(Countable(30), global_batch_size=8, batching=by_length)
    assert len(loader) == len(list(loader)) == 8
    with pytest.raises(UsageError, match="after a loop with batching="):
        loader.sample_positions()
    limited = BalancedBatches(lengths=length_of, max_cost=40)
    loader = pretended_rank().dataloader(Countable(30), global_batch_size=8, batching=limited)
    with pytest.raises(TypeError, match="the number of its batches is unknown"):
        len(loader)


class Texts(IterableDataset[Tensor]):
    """Yields texts: sample i consists of its number plus 1, and is as long as ``LENGTHS`` says."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((length,), i + 1) for i, length in enumerate(LENGTHS))


def padded_rows(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


# What is balanced, and what is not and has the same global batches.
STREAM: dict[str, Any] = {"dataset": Texts(), "lengths": len}
MAP: dict[str, Any] = {"dataset": list(Texts()), "shuffle": True, "lengths": LENGTHS}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({**MAP, "micro_batch_size": 2}, {**MAP, "lengths": None}),
    ({**MAP, "max_cost": 40.0}, {**MAP, "lengths": None}),
    ({**STREAM, "max_cost": 40.0}, {**STREAM, "lengths": None}),
    ({**STREAM, **of_workers(2)}, {**STREAM, "lengths": None}),
]


def train_all(
    cases: list[dict[str, Any]], folder: Path, stop: int, shares: tuple[int, ...] | None
) -> list[tuple[list[list[int]], list[float], Tensor]]:
    """Train a model in each case, for some steps. Return this rank's samples and the loss of each step, and weights."""
    with unitrain.init(precision="fp64", device="cpu", shares=shares, timeout_s=60) as strategy:
        parts: list[tuple[Any, Any, Any]] = []
        for case in cases:
            torch.manual_seed(0)
            model: nn.Module = nn.Sequential(nn.Embedding(31, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
            prepared = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
            parts.append((*prepared, strategy.dataloader(global_batch_size=8, collate_fn=padded_rows, **batched(case))))
        objects = {f"{'mol'[kind]}{i}": part for i, those in enumerate(parts) for kind, part in enumerate(those)}
        checkpoint = strategy.checkpoint(folder, background=False, **objects)
        checkpoint.resume()
        found = [train(strategy, *those, stop) for those in parts]
        checkpoint.save()
    return found


def train(
    strategy: unitrain.Strategy, model: nn.Module, optimizer: Any, loader: unitrain.Loader, stop: int
) -> tuple[list[list[int]], list[float], Tensor]:
    seen: list[list[int]] = [[]]
    losses: list[float] = []
    meter = strategy.meter()
    for tokens in loader:
        mask = tokens > 0
        loss = ((model(tokens).squeeze(-1) - tokens.sin()).square() * mask).sum() / mask.sum()
        meter.add(mean=loss, count=0 if loader.stand_in else int(mask.sum()))
        seen[-1] += [] if loader.stand_in else (tokens[:, 0] - 1).tolist()
        if strategy.step(loss, optimizer, weight=mask.sum()).stepped:
            losses.append(meter.value())
            seen, meter = [*seen, []], strategy.meter()
        if len(losses) == stop:
            break
    return seen[:-1], losses, torch.cat([value.flatten() for value in strategy.unwrap(model).state_dict().values()])


def test_balanced_training_is_that_of_one_process_and_continues_on_other_ranks(tmp_path: Path) -> None:
    """Micro-batches differ in number and size between the worlds, and each is padded to its own longest sample."""
    balanced, plain = map(list, zip(*CASES, strict=True))
    begun = run_ranks(train_all, balanced, tmp_path / "parts", 2, (2, 1, 1), nprocs=3)
    ended = run_ranks(train_all, balanced, tmp_path / "parts", 9, None, nprocs=2)
    for number, (samples, losses, weights) in enumerate(train_all(plain, tmp_path / "whole", 9, None)):
        first, last = ([found[number] for found in ranks] for ranks in (begun, ended))
        steps = [step for ranks in (first, last) for step in zip(*(seen for seen, _, _ in ranks), strict=True)]
        assert [sorted(chain(*step)) for step in steps] == [sorted(step) for step in samples]
        assert sorted(chain(*samples)) == list(range(30))
        assert first[0][1] + last[1][1] == pytest.approx(losses, rel=0, abs=1e-9)
        assert float((last[1][2] - weights).abs().max()) < 1e-9


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"lengths": LENGTHS[1:]}, DataError, r"a number for each of the 30 samples, but has shape \[29\]"),
        ({"lengths": [0, *LENGTHS[1:]]}, DataError, r"lengths must be positive numbers, but go from 0\.0 to 19\.0"),
        ({"max_cost": 18}, DataError, "sample 8 costs 19, which is more than max_cost=18"),
        ({"max_cost": 30, "micro_batch_size": 2}, ConfigError, "max_cost=30 and micro_batch_size=2 are mutually excl"),
        ({"max_cost": 30, "accumulate": 2}, ConfigError, "max_cost=30 and accumulate=2 are mutually exclusive"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        loader_of(**given)
