"""Warm worlds run functions in the same processes, unless one leaves what another would notice."""

from __future__ import annotations

import os
import random
import signal
import warnings

import numpy as np
import pytest
import torch
from ranks import run_ranks

import unitrain

pytestmark = pytest.mark.check


def noticed() -> tuple[object, ...]:
    """Return what functions usually change."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn("the same line, each time", stacklevel=1)
    return (
        os.getpid(),
        os.getcwd(),
        os.environ.get("LEFT"),
        torch.rand(2).tolist(),
        np.random.random(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        signal.getsignal(signal.SIGUSR1),
        len(shown),
    )


def change_what_is_put_back() -> int:
    os.chdir("/")
    os.environ["LEFT"] = "yes"
    random.seed(1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with unitrain.init(backend="ddp", device="cpu", timeout_s=30, deterministic=True) as job:
        torch.set_num_threads(3)
        return int(job.all_reduce(torch.ones(())))


def test_a_function_notices_nothing_of_those_before_it() -> None:
    before = run_ranks(noticed)
    for _ in range(2):
        assert run_ranks(change_what_is_put_back) == [2, 2]
        assert run_ranks(noticed) == before
