"""Waits of Horovod's collectives leave the processor to others."""

from __future__ import annotations

import time

import torch
from needs import HOROVOD
from ranks import run_ranks

from unitrain import init

LATE_S = 1.0


def wait_for_a_late_rank() -> float:
    """Return the processor time of a rank's main thread in an all-reduce to which rank 1 comes late."""
    with init(backend="horovod", device="cpu") as strategy:
        strategy.barrier()
        if strategy.rank == 1:
            time.sleep(LATE_S)
        began = time.thread_time()
        assert strategy.all_reduce(torch.ones(3), "sum").tolist() == [2.0, 2.0, 2.0]
        return time.thread_time() - began


@HOROVOD
def test_a_wait_does_not_spin() -> None:
    assert run_ranks(wait_for_a_late_rank, launcher="horovodrun")[0] < LATE_S / 2
