"""Shares: positions are dealt out in proportion, each once."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from math import ceil, floor

from hypothesis import given
from hypothesis import strategies as st
from test_sharding import plans

from unitrain.data.order.sharding import BatchPlan, EpochPlan
from unitrain.data.order.shares import Part, part_of, reduced

shares_of_ranks = st.lists(st.integers(1, 9), min_size=1, max_size=7).map(reduced)
sizes = st.integers(0, 120)


def parts_of(shares: tuple[int, ...]) -> list[Part]:
    return [part_of(rank, shares) for rank in range(len(shares))]


@given(shares_of_ranks, sizes, st.integers(0, 50))
def test_each_position_comes_once_in_proportion(shares: tuple[int, ...], size: int, start: int) -> None:
    parts = parts_of(shares)
    taken = [part.positions(start, start + size).tolist() for part in parts]
    assert sorted(chain.from_iterable(taken)) == list(range(start, start + size))
    for share, part, positions in zip(shares, parts, taken, strict=True):
        exact = size * share / sum(shares)
        assert floor(exact) <= part.count(size) == len(positions) <= ceil(exact)
        assert all(one < other for one, other in pairwise(positions))
        assert (size >= part.enough) == all(taken)


@given(plans, shares_of_ranks)
def test_shares_change_nothing_of_a_plan_but_counts(plan: EpochPlan | BatchPlan, shares: tuple[int, ...]) -> None:
    world_size = len(shares)
    equal = replace(plan, world_size=world_size)
    ranks = [list(replace(equal, rank=rank, shares=shares)) for rank in range(world_size)]
    for alone, *ours in zip(equal, *ranks, strict=True):
        assert sum(one.count for one in ours) == alone.stop - alone.start
        assert len({one.everywhere for one in ours}) == 1
        for one in ours:
            assert replace(one, count=alone.count, everywhere=alone.everywhere) == alone
