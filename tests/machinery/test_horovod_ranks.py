"""``run_ranks`` of the tests with Horovod. Not in ``make check``, which installs no Horovod."""

from __future__ import annotations

import os

import pytest
import torch
from needs import HOROVOD
from ranks import run_ranks

from unitrain.launch.detect import detect


def places() -> tuple[str, int, int]:
    launch = detect(os.environ)
    return launch.launcher, launch.rank, launch.world_size


def horovod_sum() -> float:
    import horovod.torch as hvd  # noqa: TID251

    hvd.init()
    total = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum).item()
    hvd.shutdown()
    return float(total)


@HOROVOD
def test_horovodrun_environment() -> None:
    assert run_ranks(places, launcher="horovodrun") == [("horovodrun", 0, 2), ("horovodrun", 1, 2)]
    assert run_ranks(horovod_sum, launcher="horovodrun", nprocs=3) == [3.0, 3.0, 3.0]


@pytest.mark.soak
@pytest.mark.launcher
@HOROVOD
def test_mpirun_starts_the_ranks() -> None:
    assert run_ranks(horovod_sum, launcher="mpirun") == [1.0, 1.0]
