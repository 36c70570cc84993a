"""``CountReduction`` reduces over the ranks, and does not wait for what a GPU computes."""

from __future__ import annotations

import pytest
import torch
from gpu_waits import communicator_on_gpu
from needs import GPU
from ranks import run_ranks

import unitrain
from unitrain.communication.counts import CountReduction


def reduce() -> tuple[list[int], list[int]]:
    with unitrain.init(timeout_s=30) as strategy:
        ranks, own = strategy.communicator, strategy.rank
        summed = CountReduction(ranks, "sum", "summed").start([own + 1, 2**40, True])
        largest = CountReduction(ranks, "max", "largest").start([own, -own, own == 0])
        return summed(), largest()


def test_integers_are_reduced() -> None:
    assert run_ranks(reduce) == [([3, 2**41, 2], [1, 0, 1])] * 2


@pytest.mark.gpu
@GPU
def test_results_are_there_before_a_gpu_has_computed_what_was_queued() -> None:
    counts = CountReduction(communicator_on_gpu(), "sum", "counts")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]  # cycles: half a second
    computed = torch.cuda.current_stream().record_event()
    assert counts.start([1, 2, 3])() == [1, 2, 3]
    assert not computed.query()
    torch.cuda.synchronize()
