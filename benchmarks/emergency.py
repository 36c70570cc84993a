"""Emergency checkpoints: how long a survivor takes to write one, and what recording a boundary costs a step.

    python benchmarks/emergency.py

Two processes train for one step, and rank 0 does what it does when the other one fails. ResNet-50 with SGD's momentum
(204 MB), and a model with Adam's states of 1 GB together. The time includes SHA-256 of every byte and the rename, after
which the checkpoint is complete for every process of the host, but no fsync. Launchers leave 1 second (mpirun), 5
(horovodrun) or 30 (torchrun).
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torchvision.models import resnet50

import unitrain
from shared.processes import GLOO, in_processes
from shared.report import Found, run, table
from shared.workloads import OnlyParameters
from unitrain.job.job import current

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS, SHORT_ROUNDS, CALLS = 5, 2, 200
LAUNCHERS_S = {"mpirun": 1, "horovodrun": 5, "torchrun": 30}
USED = 0.9  # of that time
INPUTS = {"MLP (64-64-10)": (8, 64), "ResNet-50, SGD": (2, 3, 32, 32)}


def _resnet50() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = resnet50()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _gigabyte() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = OnlyParameters([(2**20,)] * 80)
    return model, torch.optim.Adam(model.parameters())


def _small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "MLP (64-64-10)": _small,
    "ResNet-50, SGD": _resnet50,
    "1 GB, Adam": _gigabyte,
}


def measure_model(name: str, rounds: int) -> Found | None:
    """Measure the emergency checkpoints of a model, and its boundaries, on rank 0."""
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        model, optimizer = strategy.prepare(*MODELS[name]())
        folder = Path(strategy.on_main(tempfile.mkdtemp))
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        inputs = torch.ones(()) if name == "1 GB, Adam" else torch.randn(*INPUTS[name])
        strategy.step(model(inputs).square().mean(), optimizer)
        found = measure_rank_0(strategy, model, optimizer, folder, rounds) if strategy.is_main else None
        strategy.barrier()
        checkpoint.close()
        strategy.on_main(lambda: shutil.rmtree(folder))
    return found and {"model": name, **found}


def measure_rank_0(
    strategy: unitrain.Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, rounds: int
) -> Found:
    step, job = strategy.training_step, current()
    assert job is not None
    assert job.watch is not None
    saver = job.watch.saver
    assert saver is not None
    boundaries = []
    for _ in range(CALLS):
        for buffer in model.buffers():
            buffer.add_(0)  # as a forward does
        start = time.thread_time()
        step.hooks.begin_update(optimizer, ())
        step.hooks.reach_boundary()
        boundaries.append(time.thread_time() - start)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        assert saver.last_whole(1.0) == (1, "")
        saver.save()
        seconds.append(time.perf_counter() - start)
        [saved] = folder.glob("step-*")
        size = sum(file.stat().st_size for file in saved.iterdir())
        shutil.rmtree(saved)
    return {
        "seconds": statistics.median(seconds),
        "slowest": max(seconds),
        "bytes": size,
        "boundary_s": statistics.median(boundaries),
        "buffers": len(list(model.buffers())),
    }


def measure(short: bool) -> Found:
    names, rounds = (list(MODELS)[:1], SHORT_ROUNDS) if short else (list(MODELS), ROUNDS)
    return {"cases": [in_processes(GLOO, measure_model, name=name, rounds=rounds) for name in names]}


def tables(found: Found) -> str:
    rows = [
        [
            case["model"], f"{case['bytes'] / 1e6:,.1f}", f"{case['seconds']:.3f}", f"{case['slowest']:.3f}",
            ", ".join(name for name, seconds in LAUNCHERS_S.items() if case["slowest"] < USED * seconds) or "none",
            f"{case['boundary_s'] * 1e6:.1f}", str(case["buffers"]),
        ]
        for case in found["cases"]
    ]  # fmt: skip
    head = [
        "model",
        "MB",
        "s, median",
        "s, slowest",
        "in time under",
        "a boundary, µs of CPU",
        "buffers that change",
    ]
    return table(head, rows)


def plot(found: Found, figure: Figure) -> None:
    axis = figure.subplots()
    names = [case["model"] for case in found["cases"]]
    axis.barh(names, [case["seconds"] for case in found["cases"]])
    axis.axvline(USED * LAUNCHERS_S["mpirun"], color="black", linewidth=0.8)
    axis.set_xlabel("seconds to write an emergency checkpoint; the line is what mpirun leaves")
    figure.set_size_inches(9, 3.5)


if __name__ == "__main__":
    run(measure, tables, plot)
