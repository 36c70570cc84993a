"""The simulated device's collectives: they behave to streams and the host as NCCL's do."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from on_device import NEEDS_COMPILER, run, sim

from unitrain.launch.detect import detect

pytestmark = NEEDS_COMPILER


def begin(folder: Path) -> int:
    rank = detect(os.environ).rank
    sim.set_device(rank)
    dist.init_process_group(
        "simccl",
        store=dist.FileStore(str(folder / "store"), 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
        device_id=torch.device("sim", rank),
    )
    return rank


def communicate(folder: Path) -> None:
    rank = begin(folder)
    value = torch.arange(4.0, device="sim") + 10 * rank
    for op, expected in ((dist.ReduceOp.SUM, [10, 12, 14, 16]), (dist.ReduceOp.AVG, [5, 6, 7, 8])):
        reduced = value.clone()
        dist.all_reduce(reduced, op)
        assert reduced.tolist() == expected
    sent = value.clone()
    dist.broadcast(sent, 1)
    assert sent.tolist() == [10, 11, 12, 13]
    gathered = torch.empty(2, 4, device="sim")
    dist.all_gather_single(gathered, value)
    assert gathered.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    parts = [torch.empty(4, device="sim") for _ in range(2)]
    dist.all_gather(parts, value)
    assert torch.stack(parts).tolist() == gathered.tolist()
    part = torch.empty(2, device="sim")
    dist.reduce_scatter_single(part, value)
    assert part.tolist() == ([10, 12], [14, 16])[rank]
    exchanged = torch.empty(4, device="sim")
    dist.all_to_all_single(exchanged, value)
    assert exchanged.tolist() == ([0, 1, 10, 11], [2, 3, 12, 13])[rank]
    if rank == 0:
        dist.send(value, 1)
    else:
        dist.recv(value, 0)
        assert value.tolist() == [0, 1, 2, 3]
    dist.barrier()
    dist.destroy_process_group()


def test_every_collective_gives_its_result(tmp_path: Path) -> None:
    run(communicate, tmp_path, nprocs=2)


def overlaps(folder: Path) -> None:
    begin(folder)
    value = torch.ones(4, device="sim")
    waits = sim.host_waits()
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    early = value.clone()  # legal to queue, but its numbers are those of before
    work.wait()
    late = value * 10
    assert sim.host_waits() == waits, "the host waits for nothing"
    assert early.tolist() == [1] * 4
    assert late.tolist() == [20] * 4
    compressed = dist.all_reduce(value, async_op=True)
    assert compressed is not None
    then = compressed.get_future().then(lambda future: future.value()[0] / 2)
    assert then.wait().tolist() == [2] * 4, "what is added to a future runs behind it on the device"
    dist.destroy_process_group()


def test_work_that_is_not_waited_for_has_the_numbers_of_before(tmp_path: Path) -> None:
    run(overlaps, tmp_path, nprocs=2)
