"""A script's own ``Division`` decides which samples of a global batch each rank takes, and the loader does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pretended import pretended_rank
from streams import Numbers

from unitrain.data.order.division import Division
from unitrain.data.order.order import Order


class Blocks(Division):
    """Gives each rank consecutive samples, in as many micro-batches as are asked for."""

    def in_epoch(self, order: Order) -> Blocks:
        return self

    def parts(self, samples: Any, first: int, cuts: int, shares: Sequence[int]) -> list[list[NDArray[np.int64]]]:
        blocks = np.array_split(np.arange(first, first + len(samples)), cuts * len(shares))
        return [blocks[begin : begin + len(shares)] for begin in range(0, len(blocks), len(shares))]


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
