"""The arithmetic of an epoch: each position once, windows independent of the world, counts that add up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unitrain.data.order.sharding import BatchPlan, EpochPlan

Plan = EpochPlan | BatchPlan


@st.composite
def epoch_plans(draw: st.DrawFn) -> EpochPlan:
    accumulate = draw(st.integers(1, 5))
    global_batch = draw(st.integers(accumulate, 50))
    samples = draw(st.integers(1, 300))
    start = global_batch * draw(st.integers(0, samples // global_batch))
    return EpochPlan(
        samples=samples,
        global_batch=global_batch,
        accumulate=accumulate,
        rank=0,
        world_size=1,
        drop_last=draw(st.booleans()),
        start=start,
    )


@st.composite
def batch_plans(draw: st.DrawFn) -> BatchPlan:
    sizes = draw(st.lists(st.integers(1, 12), max_size=8))
    start = sum(sizes[: draw(st.integers(0, len(sizes)))])
    return BatchPlan(sizes=tuple(sizes), accumulate=draw(st.integers(1, 5)), rank=0, world_size=1, start=start)


plans = st.one_of(epoch_plans(), batch_plans())


@given(plans)
def test_windows_begin_end_and_follow_one_another(plan: Plan) -> None:
    micro_batches = list(plan)
    assert len(micro_batches) == plan.micro_batches
    assert sum(one.last for one in micro_batches) == sum(one.first for one in micro_batches) == plan.steps
    assert [one.opening for one in micro_batches] == [i == 0 for i in range(len(micro_batches))]
    for one, following in pairwise(micro_batches):
        assert one.stop == following.start
        assert one.last == following.first
        assert following.step == one.step + one.last
    for step in {one.step for one in micro_batches}:
        window = [one for one in micro_batches if one.step == step]
        assert len(window) <= plan.accumulate
        assert {one.window for one in window} == {sum(one.stop - one.start for one in window)}


@given(epoch_plans())
def test_full_windows_are_cut_evenly(plan: EpochPlan) -> None:
    full = [one for one in plan if one.window == plan.global_batch]
    sizes = [one.stop - one.start for one in full]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(sizes) % plan.accumulate == 0


@pytest.mark.parametrize(
    ("samples", "drop_last", "steps", "micro_batches"),
    [(20, False, 2, 6), (21, False, 3, 7), (24, False, 3, 8), (29, False, 3, 9), (29, True, 2, 6), (9, True, 0, 0)],
)
def test_partial_windows(samples: int, drop_last: bool, steps: int, micro_batches: int) -> None:
    """A window of 10 is cut into 3, 3 and 4."""
    plan = EpochPlan(samples=samples, global_batch=10, accumulate=3, rank=0, world_size=1, drop_last=drop_last)
    assert (plan.steps, plan.micro_batches, len(list(plan))) == (steps, micro_batches, micro_batches)
