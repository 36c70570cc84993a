"""A script's own ``Division`` decides which samples of a global batch each rank takes, and the loader does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pretended import pretended_rank, trained
from streams import Numbers, Shards

from unitrain import CheckpointError, ConfigError
from unitrain.data.order.division import Division
from unitrain.data.order.order import Order


class Blocks(Division):
    """Gives each rank consecutive samples, in as many micro-batches as are asked for."""

    def in_epoch(self, order: Order, global_batch: int | None, samples: int, seed: int) -> tuple[Order, Blocks]:
        return order, self

    def parts(self, samples: Any, first: int, cuts: int, shares: Sequence[int]) -> list[list[NDArray[np.int64]]]:
        blocks = np.array_split(np.arange(first, first + len(samples)), cuts * len(shares))
        return [blocks[begin : begin + len(shares)] for begin in range(0, len(blocks), len(shares))]


class Reversed(Blocks):
    """Yields the samples in the opposite order."""

    order_facts = {"the direction": -1}

    def in_epoch(self, order: Order, global_batch: int | None, samples: int, seed: int) -> tuple[Order, Reversed]:
        return _Backwards(samples), self


class _Backwards:
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.samples - 1 - positions


class Batching:
    def __init__(self, division: Division) -> None:
        self.made = division

    def division(self, dataset: Any, *, is_stream: bool) -> Division:
        return self.made


def loader_of(dataset: Any, division: Division | None = None, rank: int = 0, world_size: int = 1, **given: Any) -> Any:
    strategy = pretended_rank(rank, world_size, **given)
    batching = None if division is None else Batching(division)
    return strategy.dataloader(dataset, global_batch_size=8, batching=batching)


@pytest.mark.parametrize("dataset", [list(range(20)), Numbers(20)], ids=["map", "stream"])
def test_each_rank_takes_what_the_division_gives_it(dataset: Any) -> None:
    ranks = [loader_of(dataset, Blocks(), rank, 2, accumulate=2) for rank in range(2)]
    assert [[batch.tolist() for batch in loader] for loader in ranks] == [
        [[0, 1], [4, 5], [8, 9], [12, 13], [16, 17]],
        [[2, 3], [6, 7], [10, 11], [14, 15], [18, 19]],
    ]
    single = loader_of(dataset, Blocks())
    assert [*chain(*(batch.tolist() for batch in single))] == list(range(20))


def test_an_order_continues_only_with_the_same_division() -> None:
    first = loader_of(list(range(20)), Reversed())
    assert [batch.tolist() for batch in trained(first, 1)] == [[19, 18, 17, 16, 15, 14, 13, 12]]
    state = first.state_dict()
    resumed = loader_of(list(range(20)), Reversed())
    resumed.load_state_dict(state)
    assert [*chain(*(batch.tolist() for batch in resumed))] == list(range(11, -1, -1))
    with pytest.raises(CheckpointError, match=r"the direction, the global batch size, on which .* and are now None"):
        loader_of(list(range(20))).load_state_dict(state)


def test_shards_are_not_divided() -> None:
    with pytest.raises(ConfigError, match=r"a sharded Shards can't be divided by batching="):
        loader_of(Shards([9]), Blocks())
