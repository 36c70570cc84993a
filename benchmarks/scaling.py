"""Scaling: a step on 1, 2, 4 and 8 processes, and a cost model from measured parts that predicts it for more.

    python benchmarks/scaling.py

ResNet-18 with 8 images of 32 x 32 per process, over gloo, by hand (DDP) and with UniTrain, in turns. The cost
model has three measured parts: the step on one process, and, between two processes, the all-reduces of the gradients
and of a few bytes. Its prediction for 4 and 8 processes is compared with measurements. These share the machine's cores,
so their efficiency is at most cores / processes. Efficiency on separate hosts is predicted, not measured, and labelled
as such.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

import unitrain
from loops import by_hand, ours
from shared.cost_model import Link, step_on_hosts, step_on_one_machine
from shared.processes import World, in_processes, world_name
from shared.report import Found, run, table
from shared.rounds import Way, alternate, compared, shown_ratio
from shared.workloads import mlp, resnet18

PROCESSES, SHORT_PROCESSES = (1, 2, 4, 8), (1, 2)
LENGTH, SHORT = (7, 2), (2, 1)  # rounds, and steps per round
HAND, OURS, REDUCE, LATENCY = "by hand", "UniTrain", "all-reduce of the gradients", "all-reduce of 4 bytes"
LINKS = {
    "1 Gbit/s, 50 µs": Link(50e-6, 1e9 / 8),
    "10 Gbit/s, 30 µs": Link(30e-6, 10e9 / 8),
    "100 Gbit/s, 5 µs": Link(5e-6, 100e9 / 8),
}
HOSTS = (1, 2, 8, 32, 128, 512)


def measure_world(rounds: int, steps: int, small: bool) -> Found | None:
    """Measure a step and its communication in this process's world."""
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        task = (mlp if small else resnet18)(strategy.rank)
        loops = {HAND: by_hand.plain(task, strategy.config.backend), OURS: ours.plain(task, strategy)}
        ways: dict[str, Way] = {name: partial(loop.run, steps) for name, loop in loops.items()}
        gradients = torch.zeros(sum(p.numel() for p in loops[HAND].model.parameters()))
        if strategy.world_size > 1:
            ways[REDUCE] = partial(_reduce, strategy, gradients, steps)
            ways[LATENCY] = partial(_reduce, strategy, torch.zeros(1), steps)
        found: Found = {**compared(alternate(ways, rounds, before=strategy.barrier), HAND, steps)}
        found["gradient_bytes"] = gradients.numel() * gradients.element_size()
        return found if strategy.is_main else None


def _reduce(strategy: unitrain.Strategy, tensor: torch.Tensor, times: int) -> None:
    for _ in range(times):
        strategy.communicator.all_reduce_async(tensor, "sum", "benchmark")()


def measure(short: bool) -> Found:
    rounds, steps = SHORT if short else LENGTH
    how: dict[str, Any] = {"rounds": rounds, "steps": steps, "small": short}
    worlds = {}
    for number in SHORT_PROCESSES if short else PROCESSES:
        world: World = ("torchrun" if number > 1 else "python", number)
        worlds[str(number)] = in_processes(world, measure_world, **how)
    alone, pair = worlds["1"], worlds["2"]
    for processes, its in worlds.items():
        its["model_s"] = step_on_one_machine(
            alone[OURS]["seconds"], pair[REDUCE]["seconds"], pair[LATENCY]["seconds"], int(processes),
            len(os.sched_getaffinity(0)),
        )  # fmt: skip
    predicted = {
        name: {
            str(hosts): alone[OURS]["seconds"]
            / step_on_hosts(alone[OURS]["seconds"], alone["gradient_bytes"], hosts, link)
            for hosts in HOSTS
        }
        for name, link in LINKS.items()
    }
    return {"worlds": worlds, "predicted_efficiency": predicted}


def tables(found: Found) -> str:
    alone = found["worlds"]["1"][OURS]["seconds"]
    rows = []
    for processes, its in found["worlds"].items():
        step = its[OURS]["seconds"]
        world = world_name(("torchrun" if int(processes) > 1 else "python", int(processes)))
        reduce_s = f"{its[REDUCE]['seconds'] * 1e3:.1f}" if REDUCE in its else ""
        rows.append(
            [
                world, f"{its[HAND]['seconds'] * 1e3:.1f}", f"{step * 1e3:.1f}", shown_ratio(its[OURS]), reduce_s,
                f"{alone / step:.0%}", f"{its['model_s'] * 1e3:.1f}", f"{its['model_s'] / step - 1:+.0%}",
            ]
        )  # fmt: skip
    head = [
        "world", "by hand, ms", "UniTrain, ms", "ratio (quartiles)", "gradients' all-reduce, ms", "efficiency",
        "model, ms", "model's error",
    ]  # fmt: skip
    predictions = [
        [name, *(f"{efficiency:.0%}" for efficiency in its.values())]
        for name, its in found["predicted_efficiency"].items()
    ]
    return "\n".join(
        [
            table(head, rows),
            "**Predicted, not measured**: efficiency on hosts of their own, with one such core each, if nothing of the "
            "ring's messages overlapped with computing. A real run overlaps most of them.\n",
            table(["link", *(f"{hosts} hosts" for hosts in HOSTS)], predictions),
        ]
    )


if __name__ == "__main__":
    run(measure, tables)
