"""All-reduce by size: latency and bandwidth of each backend, of its communication library alone, and of memory.

    python benchmarks/all_reduce.py

Two processes on this machine sum a float32 tensor in place. The backend's all-reduce, as gradients use it, is compared
with the library's alone: MPI's Allreduce through mpi4py, or gloo's through torch.distributed. Memory is a numpy copy of
as many bytes, on both processes at once. All take turns in the same processes. Under mpirun, Horovod's own thread also
calls MPI during the measured Allreduce, once in each of its cycles (1 ms).
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import unitrain
from shared.processes import GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.rounds import Way, alternate, compared, repeat

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORLDS = (GLOO, HOROVOD_MPI, HOROVOD_GLOO)
SIZES, ROUNDS = [4**n * 1024 for n in range(10)], 9  # 1 KB to 256 MB
SHORT_SIZES, SHORT_ROUNDS = [1024, 2**20], 2
BACKEND, ALONE, MEMORY = "backend", "transport alone", "memory copy"


def transport(strategy: unitrain.Strategy, meeting: str) -> Any:
    """Return a function that sums a tensor in place with the communication library alone."""
    if strategy.launch.launcher == "mpirun":
        from mpi4py import MPI

        return lambda tensor: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())
    if not dist.is_initialized():
        store = dist.FileStore(meeting, strategy.world_size)
        dist.init_process_group("gloo", store=store, rank=strategy.rank, world_size=strategy.world_size)
    return dist.all_reduce


def measure_world(sizes: list[int], rounds: int, meeting: str) -> Found | None:
    """Measure each size in this process's world."""
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        reduce_alone = transport(strategy, meeting)

        def reduce_by_backend(tensor: torch.Tensor) -> None:
            strategy.communicator.all_reduce_async(tensor, "sum", "benchmark")()

        found = {}
        for size in sizes:
            tensor, other = torch.zeros(size // 4), torch.ones(size // 4)
            calls = max(1, min(50, 2**24 // size))
            once: dict[str, Way] = {
                BACKEND: partial(reduce_by_backend, tensor),
                ALONE: partial(reduce_alone, tensor),
                MEMORY: partial(np.copyto, tensor.numpy(), other.zero_().numpy()),
            }
            ways: dict[str, Way] = {name: partial(repeat, way, calls) for name, way in once.items()}
            found[str(size)] = compared(alternate(ways, rounds, before=strategy.barrier), ALONE, calls)
        if strategy.launch.launcher == "horovodrun":
            dist.destroy_process_group()
        return found if strategy.is_main else None


def measure(short: bool) -> Found:
    sizes, rounds = (SHORT_SIZES, SHORT_ROUNDS) if short else (SIZES, ROUNDS)
    found = []
    for world in startable(*WORLDS):
        with tempfile.TemporaryDirectory() as folder:
            meeting = str(Path(folder, "meeting"))
            found.append((world, in_processes(world, measure_world, sizes=sizes, rounds=rounds, meeting=meeting)))
    return {"worlds": found}


def tables(found: Found) -> str:
    rows = []
    for world, sizes in found["worlds"]:
        for size, ways in sizes.items():
            shown = [f"{ways[name]['seconds'] * 1e6:,.0f}" for name in (BACKEND, ALONE)]
            speeds = [f"{int(size) / ways[name]['seconds'] / 1e9:.2f}" for name in (BACKEND, ALONE, MEMORY)]
            low, high = ways[BACKEND]["ratio_quartiles"]
            ratio = f"{ways[BACKEND]['ratio']:.2f} ({low:.2f} to {high:.2f})"
            rows.append([world_name(world), _size(int(size)), *shown, ratio, *speeds])
    head = [
        "world", "bytes", "backend, µs", "transport alone, µs", "ratio (quartiles)", "backend, GB/s",
        "transport alone, GB/s", "memory copy, GB/s",
    ]  # fmt: skip
    return table(head, rows)


def _size(size: int) -> str:
    return f"{size // 2**20} MB" if size >= 2**20 else f"{size // 2**10} KB"


def plot(found: Found, figure: Figure) -> None:
    figure.set_size_inches(12, 4.5)
    left, right = figure.subplots(1, 2)
    for i, (world, sizes) in enumerate(found["worlds"]):
        bytes_ = [int(size) for size in sizes]
        for name, line in ((BACKEND, "-"), (ALONE, "--")):
            seconds = [ways[name]["seconds"] for ways in sizes.values()]
            style: dict[str, Any] = {"color": f"C{i}", "linestyle": line, "label": f"{world_name(world)}: {name}"}
            left.loglog(bytes_, [one * 1e6 for one in seconds], **style)
            right.loglog(bytes_, [size / one / 1e9 for size, one in zip(bytes_, seconds, strict=True)], **style)
    left.set_ylabel("µs")
    right.set_ylabel("GB/s")
    for axis in (left, right):
        axis.set_xlabel("bytes")
        axis.grid(alpha=0.3)
    left.legend(fontsize=7)


if __name__ == "__main__":
    run(measure, tables, plot)
