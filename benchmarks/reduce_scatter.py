"""Gradients whose sum every rank gets, and gradients of which each rank gets its rows only.

    python benchmarks/reduce_scatter.py

If each rank updates its rows of the weights, it needs the averaged gradient of these only. 151 MB of gradients are
summed in six buckets at once: by the all-reduce of the backend, which takes part twice, to show the spread; and by what
gives each rank its rows. First, that is the reduce-scatter of the communication library; second, its all-to-all, whose
parts each rank adds up. Both need a copy in which the rows of a rank are one block. Third, over gloo, messages between
each two ranks, from gradients in which they are one block already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import unitrain
from loops import by_hand
from shared.processes import GLOO, HOROVOD_GLOO, HOROVOD_MPI, World, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.rounds import Way, alternate, compared, shown_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THREE: World = ("torchrun", 3)
WORLDS = (GLOO, THREE, HOROVOD_MPI, HOROVOD_GLOO)
BASE, CONTROL, SCATTER, ALL_TO_ALL = "all-reduce", "all-reduce, again", "reduce-scatter", "all-to-all and a sum"
MESSAGES = "messages and a sum, rows in one block"
BUCKETS, TENSORS, ELEMENTS, ROUNDS = 6, 6, 2**20, 15  # tensors of a bucket, and elements of a tensor
SHORT_ELEMENTS, SHORT_ROUNDS = 2**10, 2

Start = Callable[[Tensor, str], Callable[[], Tensor]]
"""Starts to sum a tensor's parts, one for each rank, and returns a function that waits and returns this rank's sum."""


def starts(strategy: unitrain.Strategy) -> dict[str, Start]:
    """Return the collectives of the communication library that give each rank its part."""

    def scatter_by_torch(tensor: Tensor, name: str) -> Callable[[], Tensor]:
        part = torch.empty_like(tensor[:1])
        work: Any = dist.reduce_scatter_tensor(part, tensor, async_op=True)
        return lambda: (work.wait(), part[0])[1]

    def exchange_by_torch(tensor: Tensor, name: str) -> Callable[[], Tensor]:
        parts = torch.empty_like(tensor)
        work: Any = dist.all_to_all_single(parts, tensor, async_op=True)
        return lambda: (work.wait(), parts.sum(0))[1]

    def scatter_by_horovod(tensor: Tensor, name: str) -> Callable[[], Tensor]:
        hvd: Any = by_hand.horovod()
        handle = hvd.reducescatter_async(tensor, op=hvd.Sum, name=f"scatter {name}")
        return lambda: hvd.synchronize(handle)[0]

    def exchange_by_horovod(tensor: Tensor, name: str) -> Callable[[], Tensor]:
        hvd: Any = by_hand.horovod()
        handle = hvd.alltoall_async(tensor, name=f"exchange {name}")
        return lambda: hvd.synchronize(handle)[0].sum(0)

    if strategy.config.backend == "ddp":
        return {SCATTER: scatter_by_torch, ALL_TO_ALL: exchange_by_torch}
    return {SCATTER: scatter_by_horovod, ALL_TO_ALL: exchange_by_horovod}


def ways(strategy: unitrain.Strategy, gradients: list[Tensor]) -> dict[str, Way]:
    """Return the ways to sum gradients, each a bucket of (tensors, ranks, elements of a rank)."""
    rank, ranks = strategy.rank, strategy.world_size
    packed = [torch.empty_like(bucket).view(ranks, TENSORS, -1) for bucket in gradients]

    def all_reduce() -> None:
        start = strategy.communicator.all_reduce_async
        for wait in [start(bucket, "sum", f"bucket {i}") for i, bucket in enumerate(gradients)]:
            wait()

    def scatter(start: Start) -> None:
        waits = []
        for i, (bucket, blocks) in enumerate(zip(gradients, packed, strict=True)):
            blocks.copy_(bucket.transpose(0, 1))
            waits.append(start(blocks, f"bucket {i}"))
        for bucket, wait in zip(gradients, waits, strict=True):
            bucket[:, rank] = wait()

    def messages() -> None:
        under_way: list[tuple[Tensor, Tensor, list[Any]]] = []
        for bucket, received in zip(gradients, packed, strict=True):
            blocks = bucket.view(ranks, -1)
            for distance in range(1, ranks):
                to, source = (rank + distance) % ranks, (rank - distance) % ranks
                into = received[source].view(-1)
                under_way.append((blocks[rank], into, [dist.irecv(into, source), dist.isend(blocks[to], to)]))
        for own, into, works in under_way:
            for work in works:
                work.wait()
            own += into

    made: dict[str, Way] = {BASE: all_reduce, CONTROL: all_reduce}
    made |= {name: partial(scatter, start) for name, start in starts(strategy).items()}
    if strategy.config.backend == "ddp":
        made[MESSAGES] = messages
    return made


def check(strategy: unitrain.Strategy, name: str, way: Way, gradients: list[Tensor]) -> None:
    """Check that a way gives this rank the sum of its rows."""
    ranks = strategy.world_size
    for bucket in gradients:
        bucket.fill_(strategy.rank + 1)
    way()
    for bucket in gradients:
        own = bucket.view(ranks, -1)[strategy.rank] if name == MESSAGES else bucket[:, strategy.rank]
        assert bool((own == ranks * (ranks + 1) / 2).all()), name
        bucket.zero_()


def measure_world(elements: int, rounds: int) -> Found | None:
    """Measure each way in this process's world."""
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        ranks = strategy.world_size
        gradients = [torch.zeros(TENSORS, ranks, elements // ranks) for _ in range(BUCKETS)]
        made = ways(strategy, gradients)
        for name, way in made.items():
            check(strategy, name, way, gradients)
        found: Found = compared(alternate(made, rounds, before=strategy.barrier), BASE)
        return found if strategy.is_main else None


def measure(short: bool) -> Found:
    elements, rounds = (SHORT_ELEMENTS, SHORT_ROUNDS) if short else (ELEMENTS, ROUNDS)
    worlds = startable(*((GLOO, HOROVOD_GLOO) if short else WORLDS))
    return {
        "worlds": [(world, in_processes(world, measure_world, elements=elements, rounds=rounds)) for world in worlds]
    }


def tables(found: Found) -> str:
    rows = [
        [world_name(world), name, f"{one['seconds'] * 1e3:.1f}", shown_ratio(one)]
        for world, its in found["worlds"]
        for name, one in its.items()
    ]
    return table(["world", "way", "ms", "ratio (quartiles)"], rows)


def plot(found: Found, figure: Figure) -> None:
    figure.set_size_inches(10, 5)
    axis = figure.subplots()
    bars = [(f"{name}\n{world_name(world)}", one) for world, its in found["worlds"] for name, one in its.items()]
    axis.barh([name for name, _ in bars], [one["ratio"] for _, one in bars])
    axis.axvline(1, color="gray")
    axis.invert_yaxis()
    axis.set_xlabel("time, in that of the all-reduce")
    axis.tick_params(labelsize=6)


if __name__ == "__main__":
    run(measure, tables, plot)
