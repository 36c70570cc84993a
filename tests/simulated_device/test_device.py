"""The simulated device itself: its memory, streams, events, generator and operators."""

from __future__ import annotations

import ctypes
import math
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_device import NEEDS_COMPILER, run, sim
from torch import Tensor, nn
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


CALLS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, i: x @ x.T,
    lambda x, i: x.bfloat16() * 0.3,
    lambda x, i: x.sum() * 0.3 + 1e-9,
    lambda x, i: (i / 2, i * 2.5, i // 2),
    lambda x, i: x.unfold(1, 3, 1) + 1,
    lambda x, i: x[:, 1:].transpose(0, 1).contiguous().view(-1),
    lambda x, i: x.sort(dim=1),
    lambda x, i: (x[x > 0], i.nonzero(), torch.unique(i)),
    lambda x, i: (F.embedding(i, x), x.index_select(0, i[:2]), x[i]),
    lambda x, i: torch.cat([x, x.exp()]).cumsum(0),
    lambda x, i: torch.where(x > 0, x, torch.tensor(0.5)),
    lambda x, i: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    lambda x, i: x.clone().mul_(2).add_(x).clamp_(-1, 1),
    lambda x, i: torch._foreach_norm([x, x * 2]),
    lambda x, i: F.max_pool2d(F.conv2d(x[None, None], x[None, None, :2, :2]), 2),
    lambda x, i: F.mse_loss(x, x * 2),
    lambda x, i: F.cross_entropy(x, i[:4] % 5),
    lambda x, i: F.batch_norm(x, None, None, training=True),
    lambda x, i: torch.linalg.svdvals(x),
    lambda x, i: (x.double().var(), x.std(dim=0), x.max(), x.argmax(1)),
]  # fmt: skip


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for one in result for tensor in flat(one)]


def computes() -> None:
    for number, call in enumerate(CALLS):
        generator = torch.Generator().manual_seed(number)
        x, i = torch.randn(4, 5, generator=generator), torch.randint(4, (6,), generator=generator)
        for expected, got in zip(flat(call(x, i)), flat(call(x.to("sim"), i.to("sim"))), strict=True):
            assert got.device.type == "sim"
            torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("progress", ["late", "at-once"])
def test_operators_give_the_digits_of_the_cpus(progress: str) -> None:
    run(computes, progress=progress)


def model_on(device: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    torch.__future__.set_swap_module_params_on_conversion(True)  # keeps the parameters
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    losses: list[Tensor] = []
    waits = sim.host_waits()
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(8, 3, 8, 8, generator=generator).to(device, non_blocking=True)
        loss = F.cross_entropy(model(rows), torch.arange(8, device=device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    assert sim.host_waits() == waits
    return torch.stack(losses).tolist()


def trains() -> None:
    assert model_on("sim") == model_on("cpu")


def test_training_gives_the_digits_of_the_cpus_and_waits_for_nothing() -> None:
    run(trains)


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


def freed_and_forgotten() -> bool:
    """Free memory that a side stream uses, go on in the current one, and return whether the side stream is done."""
    side = sim.Stream()
    value = torch.ones(1000, device="sim")
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        total = value.sum()
    value.record_stream(side)
    del value
    assert torch.ones(1000, device="sim").sum() == 1000
    is_done = bool(side.query())
    sim.synchronize()
    assert total == 1000
    return is_done


def test_no_stream_waits_for_another_because_memory_is_freed() -> None:
    """It would hide missing waits, and hold up collectives behind those of another group."""
    assert run(freed_and_forgotten) == [False]


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
    torch.manual_seed(1)
    first = torch.rand(3)
    torch.manual_seed(1)
    torch.rand(3, device="sim")
    sim.synchronize()
    assert torch.rand(3).tolist() == first.tolist(), "the CPU's generator is as it was"
    own = torch.Generator("sim").manual_seed(9)
    assert torch.rand(2, device="sim", generator=own).tolist() == torch.rand(2, generator=seeded(9)).tolist()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


def casts() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("sim", dtype=dtype):
            product = torch.ones(2, 2, device="sim") @ torch.ones(2, 2, device="sim")
            assert product.dtype == dtype
            assert product.softmax(0).dtype == torch.float32


def test_autocast_has_the_lists_of_a_gpus() -> None:
    run(casts)
