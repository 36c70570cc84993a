"""The gain of each setting: DDP's options, optimizers, channels_last, threads, kept memory, Horovod's timing.

    python benchmarks/levers.py

Each setting takes turns with the default in the same processes, with two exceptions. Horovod reads its settings when
it starts, so each of its settings has its own processes, in which a step takes turns with an all-reduce of as many
bytes by the communication library alone; a step is measured in units of these. Once glibc keeps freed memory, this
can't be turned off, so it has its own process; there, the thread's CPU time is compared.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from functools import partial
from os import cpu_count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from all_reduce import transport
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unitrain
from loops import ours
from shared.processes import ALONE, GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, run, table
from shared.rounds import Way, alternate, compared, repeat, shown_ratio
from shared.workloads import OnlyParameters, mlp, resnet18, resnet50_shapes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT = "default"
DDP_OPTIONS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "bucket_cap_mb 5": {"bucket_cap_mb": 5},
    "bucket_cap_mb 100": {"bucket_cap_mb": 100},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {DEFAULT: {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
HOROVOD: dict[str, dict[str, str]] = {
    DEFAULT: {},
    "cycle time 0.5 ms": {"HOROVOD_CYCLE_TIME": "0.5"},
    "cycle time 5 ms": {"HOROVOD_CYCLE_TIME": "5"},
    "fusion buffer 16 MB": {"HOROVOD_FUSION_THRESHOLD": str(2**24)},
    "no fusion": {"HOROVOD_FUSION_THRESHOLD": "0"},
}
LENGTH, SHORT = (11, 2), (2, 1)  # rounds, and steps per round


def measure_ddp(rounds: int, steps: int, small: bool) -> Found | None:
    """Measure DDP's options on ResNet-50's tensors."""
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:

        def way(options: dict[str, Any]) -> Way:
            model = DistributedDataParallel(_only_parameters(small), **options)
            return partial(_train, model, torch.optim.SGD(model.parameters(), lr=0.01), steps)

        ways = {name: way(options) for name, options in DDP_OPTIONS.items()}
        found = compared(alternate(ways, rounds, before=strategy.barrier), DEFAULT, steps)
        return found if strategy.is_main else None


def measure_optimizer(name: str, rounds: int, steps: int, small: bool) -> Found:
    """Measure the implementations of an optimizer, on ResNet-50's tensors in one process."""
    torch.set_num_threads(1)
    ways = {}
    for way, options in OPTIMIZERS.items():
        model = _only_parameters(small)
        model(torch.ones(())).backward()
        ways[way] = partial(repeat, getattr(torch.optim, name)(model.parameters(), lr=0.01, **options).step, steps)
    return compared(alternate(ways, rounds, clock=time.thread_time), DEFAULT, steps)


def measure_channels_last(rounds: int, steps: int, small: bool) -> Found:
    """Measure ResNet-18's step in either memory format, in one process."""
    torch.set_num_threads(1)
    task, ways = resnet18(0), {}
    for name, memory_format in ((DEFAULT, torch.contiguous_format), ("channels_last", torch.channels_last)):
        model, optimizer = task.make()
        inputs = task.inputs.to(memory_format=memory_format)
        model.to(memory_format=memory_format)

        def step(model: nn.Module = model, optimizer: Any = optimizer, inputs: torch.Tensor = inputs) -> None:
            optimizer.zero_grad()
            task.loss(model(inputs)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        ways[name] = partial(repeat, step, steps)
    return compared(alternate(ways, rounds, clock=time.thread_time), DEFAULT, steps)


def measure_threads(rounds: int, steps: int, small: bool) -> Found | None:
    """Measure UniTrain's step on ResNet-18 with the host's cores divided among processes, and with all for each."""
    with unitrain.init(device="cpu") as strategy:
        loop = ours.plain((mlp if small else resnet18)(0), strategy)

        def way(threads: int) -> Way:
            def run() -> None:
                torch.set_num_threads(threads)
                loop.run(steps)

            return run

        ways = {DEFAULT: way(torch.get_num_threads()), "every process computes on all cores": way(cpu_count() or 1)}
        found = compared(alternate(ways, rounds, before=strategy.barrier), DEFAULT, steps)
        return found if strategy.is_main else None


def measure_kept_memory(keep: bool, rounds: int, steps: int, small: bool) -> Found:
    """Measure UniTrain's step on ResNet-18 if glibc keeps freed memory, as ``init`` sets it, or gives it back."""
    with (
        nullcontext() if keep else patch("unitrain.initialize.keep_memory"),
        unitrain.init(device="cpu", threads_per_process=1) as strategy,
    ):
        loop = ours.plain((mlp if small else resnet18)(0), strategy)
        [seconds] = alternate({"": partial(loop.run, steps)}, rounds, clock=time.thread_time).values()
        return {"seconds": [one / steps for one in seconds]}


def measure_horovod(rounds: int, steps: int, small: bool, meeting: str) -> Found | None:
    """Measure UniTrain's step on ResNet-50's tensors, and one all-reduce by the communication library."""
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        model = _only_parameters(small)
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        reduce_alone = transport(strategy, meeting)
        scale = torch.ones(())
        once: dict[str, Way] = {
            "step": lambda: strategy.step(model(scale), optimizer),
            "transport": lambda: reduce_alone(flat),
        }
        ways = {name: partial(repeat, way, steps) for name, way in once.items()}
        found = compared(alternate(ways, rounds, before=strategy.barrier), "transport", steps)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return found["step"] if strategy.is_main else None


def _only_parameters(small: bool) -> OnlyParameters:
    return OnlyParameters([(64,), (8,)] if small else resnet50_shapes())


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(())).backward()
        optimizer.step()


def measure(short: bool) -> Found:
    rounds, steps = SHORT if short else LENGTH
    how: dict[str, Any] = {"rounds": rounds, "steps": steps, "small": short}
    groups = {"DDP's options, ResNet-50's tensors": in_processes(GLOO, measure_ddp, **how)}
    for name in ("SGD", "AdamW"):
        groups[f"{name}, ResNet-50's tensors"] = in_processes(ALONE, measure_optimizer, name=name, **how)
    if not short:
        groups["memory format, ResNet-18"] = in_processes(ALONE, measure_channels_last, **how)
    groups["two processes, ResNet-18"] = in_processes(GLOO, measure_threads, **how)
    kept = {
        name: in_processes(ALONE, measure_kept_memory, keep=keep, **how)["seconds"]
        for name, keep in ((DEFAULT, True), ("glibc gives freed memory back", False))
    }
    groups["our step, ResNet-18"] = compared(kept, DEFAULT)
    horovod = []
    for world in startable(*((HOROVOD_GLOO,) if short else (HOROVOD_MPI, HOROVOD_GLOO))):
        for name, variables in list(HOROVOD.items())[: 1 if short else None]:
            with tempfile.TemporaryDirectory() as folder:
                meeting = str(Path(folder, "meeting"))
                found = in_processes(world, measure_horovod, environment=variables, meeting=meeting, **how)
            horovod.append({"world": world, "setting": name, **found})
    return {"groups": groups, "horovod": horovod}


def tables(found: Found) -> str:
    rows = [
        [group, name, f"{one['seconds'] * 1e3:.2f}", shown_ratio(one)]
        for group, its in found["groups"].items()
        for name, one in its.items()
    ]
    horovod = [
        [world_name(one["world"]), one["setting"], f"{one['seconds'] * 1e3:.1f}", shown_ratio(one)]
        for one in found["horovod"]
    ]
    return "\n".join(
        [
            table(["", "lever", "ms a step", "ratio to the default (quartiles)"], rows),
            table(["world", "Horovod's setting", "ms a step", "in all-reduces by the transport (quartiles)"], horovod),
        ]
    )


def plot(found: Found, figure: Figure) -> None:
    axis = figure.subplots()
    bars = [(f"{group}: {name}", one) for group, its in found["groups"].items() for name, one in its.items()]
    axis.barh([name for name, _ in bars], [one["ratio"] for _, one in bars])
    axis.axvline(1, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=7)
    axis.set_xlabel("time of a step / default")
    figure.set_size_inches(10, 6)


if __name__ == "__main__":
    run(measure, tables, plot)
