"""Accumulation over 4 micro-batches: time saved over synchronising each of them, and when it communicates.

    python benchmarks/accumulation.py

ResNet-18, two processes. A hand-written loop that synchronises in each micro-batch, one that synchronises once per step
(``no_sync``, or Horovod's ``backward_passes_per_step``), and UniTrain. After the timed rounds, the all-reduces that the
communication library is asked for are counted in each micro-batch of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unitrain
from loops import ACCUMULATE, by_hand
from shared.processes import GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.rounds import alternate, compared, shown_ratio
from shared.workloads import Task, bit_equal, mlp, resnet18

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORLDS = (GLOO, HOROVOD_MPI, HOROVOD_GLOO)
EACH, ONCE, OURS = "by hand, each synchronised", "by hand, once a step", "UniTrain"
LENGTH, SHORT = (9, 2), (2, 1)  # rounds, and the steps of one

# A model, and a function that trains on the n-th micro-batch of a step, and steps the optimizer after the last.
Made = tuple[nn.Module, Callable[[int], None]]


def on_ddp(task: Task, sync_each: bool) -> Made:
    """Return the hand-written loop for DDP."""
    model, optimizer = task.make()
    wrapped = DistributedDataParallel(model)

    def micro_batch(number: int) -> None:
        last = number == ACCUMULATE - 1
        with nullcontext() if last or sync_each else wrapped.no_sync():
            (task.loss(wrapped(task.inputs)) / ACCUMULATE).backward()  # type: ignore[no-untyped-call]
        if last:
            optimizer.step()
            optimizer.zero_grad()

    return model, micro_batch


def on_horovod(task: Task, sync_each: bool) -> Made:
    """Return the hand-written loop for Horovod."""
    model, inner = task.make()
    passes = 1 if sync_each else ACCUMULATE
    optimizer: Any = by_hand.horovod().DistributedOptimizer(
        inner, named_parameters=model.named_parameters(), backward_passes_per_step=passes
    )

    def micro_batch(number: int) -> None:
        (task.loss(model(task.inputs)) / ACCUMULATE).backward()  # type: ignore[no-untyped-call]
        if sync_each:
            optimizer.synchronize()
        if number == ACCUMULATE - 1:
            with optimizer.skip_synchronize() if sync_each else nullcontext():
                optimizer.step()
            optimizer.zero_grad()

    return model, micro_batch


def ours(task: Task, strategy: unitrain.Strategy) -> Made:
    """Return the loop with a strategy that accumulates."""
    model, optimizer = strategy.prepare(*task.make())

    def micro_batch(_: int) -> None:
        strategy.step(task.loss(model(task.inputs)), optimizer)

    return model, micro_batch


@contextmanager
def counted(backend: str) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of all-reduces started in the block. Call it after the block."""
    if backend == "ddp":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            yield lambda: sum(event.count for event in profiler.key_averages() if event.key == "gloo:all_reduce")
        return
    # Horovod's optimizer and UniTrain call the same function of its C extension.
    library, name = import_module("horovod.torch.mpi_ops").mpi_lib, "horovod_torch_allreduce_async_torch_FloatTensor"
    original, calls = getattr(library, name), []

    def counting(*arguments: Any) -> Any:
        calls.append(name)
        return original(*arguments)

    setattr(library, name, counting)
    try:
        yield lambda: len(calls)
    finally:
        setattr(library, name, original)


def measure_world(rounds: int, steps: int, small: bool) -> Found | None:
    """Measure each loop in this process's world, then count its all-reduces."""
    with unitrain.init(device="cpu", threads_per_process=1, accumulate=ACCUMULATE) as strategy:
        task = (mlp if small else resnet18)(strategy.rank)
        hand = on_ddp if strategy.config.backend == "ddp" else on_horovod
        made = {EACH: hand(task, True), ONCE: hand(task, False), OURS: ours(task, strategy)}
        ways = {name: partial(_train, micro_batch, steps) for name, (_, micro_batch) in made.items()}
        found: Found = compared(alternate(ways, rounds, before=strategy.barrier), EACH, steps)
        for name, (_, micro_batch) in made.items():
            found[name]["reductions"] = []
            for number in range(ACCUMULATE):
                with counted(strategy.config.backend) as count:
                    micro_batch(number)
                found[name]["reductions"].append(count())
        found[OURS]["weights_bit_equal"] = bit_equal(made[ONCE][0], made[OURS][0])
        return found if strategy.is_main else None


def _train(micro_batch: Callable[[int], None], steps: int) -> None:
    for _ in range(steps):
        for number in range(ACCUMULATE):
            micro_batch(number)


def measure(short: bool) -> Found:
    rounds, steps = SHORT if short else LENGTH
    worlds = startable(GLOO, HOROVOD_GLOO) if short else startable(*WORLDS)
    how: dict[str, Any] = {"rounds": rounds, "steps": steps, "small": short}
    return {"worlds": [(world, in_processes(world, measure_world, **how)) for world in worlds]}


def tables(found: Found) -> str:
    rows = []
    for world, ways in found["worlds"]:
        for name, one in ways.items():
            weights = {True: "bit-equal to once a step", False: "DIFFERENT", None: ""}[one.get("weights_bit_equal")]
            counts = ", ".join(map(str, one["reductions"]))
            rows.append(
                [world_name(world), name, f"{one['seconds'] * 1e3:.1f}", shown_ratio(one), counts, weights]
            )  # fmt: skip
    head = ["world", "way", "ms a step", "ratio (quartiles)", "all-reduces in each micro-batch", "weights"]
    return table(head, rows)


def plot(found: Found, figure: Figure) -> None:
    axis = figure.subplots()
    for i, name in enumerate((EACH, ONCE, OURS)):
        heights = [ways[name]["seconds"] * 1e3 for _, ways in found["worlds"]]
        axis.bar([place + 0.27 * (i - 1) for place in range(len(heights))], heights, 0.25, label=name)
    axis.set_xticks(range(len(found["worlds"])), [world_name(world) for world, _ in found["worlds"]], fontsize=7)
    axis.set_ylabel("ms a step of 4 micro-batches")
    axis.legend()


if __name__ == "__main__":
    run(measure, tables, plot)
