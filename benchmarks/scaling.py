"""Scaling: a step on 1, 2, 4 and 8 processes of this machine, and the share of it that averaging takes.

    python benchmarks/scaling.py

ResNet-18 with 8 images of 32 x 32 per process, over gloo, by hand (DDP) and with UniTrain, in turns. The processes
share the machine's cores, so their efficiency is at most cores / processes. Separate hosts are not measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import unitrain
from loops import by_hand, ours
from shared.processes import World, in_processes, world_name
from shared.report import Found, run, table
from shared.rounds import Way, alternate, compared, shown_ratio
from shared.workloads import mlp, resnet18

PROCESSES, SHORT_PROCESSES = (1, 2, 4, 8), (1, 2)
LENGTH, SHORT = (7, 2), (2, 1)  # rounds, and steps per round
HAND, OURS, REDUCE = "by hand", "UniTrain", "all-reduce of the gradients"


def measure_world(rounds: int, steps: int, small: bool) -> Found | None:
    """Measure a step and its communication in this process's world."""
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        task = (mlp if small else resnet18)(strategy.rank)
        loops = {HAND: by_hand.plain(task, strategy.config.backend), OURS: ours.plain(task, strategy)}
        ways: dict[str, Way] = {name: partial(loop.run, steps) for name, loop in loops.items()}
        gradients = torch.zeros(sum(p.numel() for p in loops[HAND].model.parameters()))
        if strategy.world_size > 1:
            ways[REDUCE] = partial(_reduce, strategy, gradients, steps)
        found: Found = {**compared(alternate(ways, rounds, before=strategy.barrier), HAND, steps)}
        return found if strategy.is_main else None


def _reduce(strategy: unitrain.Strategy, tensor: torch.Tensor, times: int) -> None:
    for _ in range(times):
        strategy.communicator.all_reduce_async(tensor, "sum", "benchmark")()


def measure(short: bool) -> Found:
    rounds, steps = SHORT if short else LENGTH
    how: dict[str, Any] = {"rounds": rounds, "steps": steps, "small": short}
    return {
        "worlds": {
            str(number): in_processes(_world(number), measure_world, **how)
            for number in (SHORT_PROCESSES if short else PROCESSES)
        }
    }


def _world(processes: int) -> World:
    return ("torchrun" if processes > 1 else "python", processes)


def tables(found: Found) -> str:
    alone = found["worlds"]["1"][OURS]["seconds"]
    rows = [
        [
            world_name(_world(int(processes))), f"{its[HAND]['seconds'] * 1e3:.1f}",
            f"{its[OURS]['seconds'] * 1e3:.1f}", shown_ratio(its[OURS]),
            f"{its[REDUCE]['seconds'] * 1e3:.1f}" if REDUCE in its else "", f"{alone / its[OURS]['seconds']:.0%}",
        ]
        for processes, its in found["worlds"].items()
    ]  # fmt: skip
    head = ["world", "by hand, ms", "UniTrain, ms", "ratio (quartiles)", "gradients' all-reduce, ms", "efficiency"]
    return table(head, rows)


if __name__ == "__main__":
    run(measure, tables)
