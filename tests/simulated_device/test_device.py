"""The simulated device itself: its memory, streams, events and generator. ``test_training.py`` has its operators."""

from __future__ import annotations

import ctypes
import math
import os
import signal

import pytest
import torch
from on_device import NEEDS_COMPILER, run, sim
from torch.nn import functional as F

pytestmark = NEEDS_COMPILER


def reads_on_the_host() -> tuple[int, int]:
    value = torch.ones(4, device="sim")
    sim.synchronize()
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(value.data_ptr(), 1)
        os._exit(0)
    return os.waitpid(child, 0)[1], int(value.sum())


def test_the_host_may_not_touch_the_devices_memory() -> None:
    assert run(reads_on_the_host) == [(signal.SIGSEGV, 4)]


def overlaps() -> None:
    side = sim.Stream()
    pinned = torch.arange(4.0).pin_memory()
    with sim.stream(side):
        moved = pinned.to("sim", non_blocking=True)
        arrived = side.record_event()
    early = moved * 2
    assert early.isnan().all(), "a missing wait reads what was there before"
    assert not arrived.query(), "a question does not wait"
    while not arrived.query():
        pass
    sim.current_stream().wait_event(arrived)
    assert (moved * 2).tolist() == [0, 2, 4, 6]

    back = torch.empty(4, pin_memory=True)
    back.copy_(moved, non_blocking=True)
    assert back.isnan().all()
    sim.current_stream().synchronize()
    assert back.tolist() == [0, 1, 2, 3]

    later = torch.arange(4.0).pin_memory()
    changed = later.to("sim", non_blocking=True)
    later.fill_(7)
    assert changed.tolist() == [7] * 4, "pinned memory is read when the stream comes to it"
    pageable = torch.arange(4.0)
    staged = pageable.to("sim", non_blocking=True)
    pageable.fill_(7)
    assert staged.tolist() == [0, 1, 2, 3]

    start, end = (sim.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_streams_work_as_late_as_is_legal() -> None:
    run(overlaps)


def freed_while_used(recorded: bool) -> float:
    side = sim.Stream()
    with sim.stream(side):
        value = torch.ones(1000, device="sim")
    sim.current_stream().wait_stream(side)
    total = value.sum()
    if recorded:
        value.record_stream(sim.current_stream())
    del value
    with sim.stream(side):
        torch.zeros(1, device="sim")  # from now on, the side stream uses the memory again
    return float(total)


def test_memory_that_another_stream_still_uses_must_be_recorded() -> None:
    assert run(freed_while_used, True) == [1000.0]
    assert math.isnan(run(freed_while_used, False)[0])


def overwritten_while_read(waits: bool) -> set[float]:
    """Read a buffer that a side stream fills again: right by chance if the side stream is late."""
    side, found = sim.Stream(), set()
    for _ in range(20):
        buffer = torch.zeros(4, device="sim")
        sim.synchronize()
        total = buffer.sum()
        if waits:
            side.wait_stream(sim.current_stream())
        with sim.stream(side):
            buffer.fill_(1)
        found.add(float(total))
        sim.synchronize()
    return found


def test_random_progress_finds_what_late_streams_hide() -> None:
    assert run(overwritten_while_read, False) == [{0.0}]
    assert run(overwritten_while_read, False, progress="random") == [{0.0, 4.0}]
    assert run(overwritten_while_read, True, progress="random") == [{0.0}]


def draws() -> None:
    for draw in (torch.rand, torch.randn, torch.randperm):
        torch.manual_seed(5)
        expected = draw(6)
        torch.manual_seed(5)
        assert draw(6, device="sim").tolist() == expected.tolist()
    state = sim.get_rng_state()
    dropped = F.dropout(torch.ones(100, device="sim"))
    torch.manual_seed(0)  # changes nothing of what was queued before
    sim.set_rng_state(state)
    assert dropped.tolist() == F.dropout(torch.ones(100, device="sim")).tolist()


def test_its_generator_draws_the_cpus_numbers() -> None:
    run(draws)


def runs_out() -> None:
    sim.set_memory_limit(1000)
    kept = torch.zeros(100, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 800 bytes"):
        torch.zeros(200, device="sim")
    assert sim.memory_allocated() == 400
    assert sim.mem_get_info() == (600, 1000)
    del kept
    assert torch.zeros(200, device="sim").sum() == 0
    assert sim.memory_allocated() == 0
    assert 800 <= sim.max_memory_allocated() < 1000


def test_it_runs_out_of_memory_at_its_limit() -> None:
    run(runs_out, fresh=True)


def fails_later() -> None:
    rows = F.embedding(torch.tensor([7], device="sim"), torch.ones(2, 2, device="sim"))
    with pytest.raises(IndexError):
        sim.synchronize()
    assert rows.isnan().all()
    with pytest.raises(RuntimeError, match="size"):
        torch.ones(2, device="sim") @ torch.ones(3, device="sim")


def test_an_error_on_the_device_is_raised_by_the_next_wait() -> None:
    run(fails_later)
