"""Warm worlds run functions in the same processes, unless one leaves what another would notice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import unitrain
from unitrain import process
from unitrain.job.watch import watch
from unitrain.launch.detect import detect
from unitrain.launch.rendezvous import rendezvous

pytestmark = pytest.mark.check

SEEN: list[int] = []


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


def replace_a_function() -> None:
    process.kill_stalled = process.print_stacks  # type: ignore[assignment]


def replace_a_method() -> None:
    watch.Watch.close = watch.Watch.fail  # type: ignore[method-assign, assignment]


def fill_a_list() -> None:
    SEEN.append(1)


def leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def leave_a_process() -> None:
    subprocess.Popen(["sleep", "600"], start_new_session=True, preexec_fn=process.end_with_parent)


def leave_a_group() -> None:
    launch = detect(os.environ)
    dist.init_process_group("gloo", store=rendezvous(launch, 30), rank=launch.rank, world_size=launch.world_size)


def leave_another_default() -> None:
    torch.set_default_dtype(torch.float64)


def compile_something() -> None:
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1))


def leave() -> None:
    if os.environ["RANK"] == "0":
        raise SystemExit(0)


def fail() -> None:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize(
    "leaves",
    [
        replace_a_function, replace_a_method, fill_a_list, leave_a_thread, leave_a_process, leave_a_group,
        leave_another_default, compile_something, leave, fail,
    ],
)  # fmt: skip
def test_what_can_not_be_put_back_ends_the_processes(leaves: Callable[[], None]) -> None:
    before = run_ranks(os.getpid)
    with suppress(ZeroDivisionError):
        run_ranks(leaves)
    assert not {*run_ranks(os.getpid)} & {*before}
