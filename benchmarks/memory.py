"""Memory: what ``prepare`` and ``resume`` take beyond the state that they leave.

    python benchmarks/memory.py

A model of 256 MB and Adam, whose state is 512 MB, on two processes. Peak and resident memory are Linux's ``VmHWM`` and
``VmRSS`` of each process. The final state is what was resident before, and the state that the call makes: ``prepare``
broadcasts rank 0's weights into the model, ``resume`` makes Adam's state, and so does ``prepare`` on ranks that did
not load one. What a call takes beyond the final state may be 64 MB.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Adam

import unitrain
from shared.processes import GLOO, HOROVOD_GLOO, HOROVOD_MPI, in_processes, startable, world_name
from shared.report import Found, run, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MB = 2**20
LAYERS, WIDTH, SHORT_WIDTH = 16, 2048, 64
ALLOWED_MB = 64
PREPARE, WITH_STATE, RESUME = "prepare", "prepare, Adam's state on rank 0", "resume"


def made(width: int) -> tuple[nn.Module, Adam]:
    """Return a model of equal layers, and its optimizer."""
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
    return model, Adam(model.parameters())


def take_step(model: nn.Module, optimizer: Adam) -> None:
    """Give the optimizer its state, and leave no gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def status(name: str) -> float:
    """Return a field of this process's status, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(name)


def beyond(call: Callable[[], object], makes_mb: float) -> dict[str, float]:
    """Return the peak of a call in MB, and what of it is beyond the final state."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is what is resident now
    before = status("VmRSS")
    call()
    peak = status("VmHWM")
    return {"final": before + makes_mb, "peak": peak, "beyond": peak - before - makes_mb}


def save(width: int, folder: str) -> bool:
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        model, optimizer = made(width)
        take_step(model, optimizer)
        model, optimizer = strategy.prepare(model, optimizer)
        strategy.checkpoint(folder, background=False, model=model, optimizer=optimizer).save()
    return True


def use(width: int, folder: str) -> Found | None:
    """Return what each way took, on the rank where it took the most beyond the final state."""
    found: dict[str, dict[str, float]] = {}
    with unitrain.init(device="cpu", threads_per_process=1) as strategy:
        state = 2 * LAYERS * width * width * 4 / MB
        model, optimizer = made(width)
        if strategy.is_main:
            take_step(model, optimizer)
        makes = 0.0 if strategy.is_main else state
        found[WITH_STATE] = beyond(lambda: strategy.prepare(model, optimizer), makes)
        del model, optimizer
        model, optimizer = made(width)
        found[PREPARE] = beyond(lambda: strategy.prepare(model, optimizer), 0.0)
        checkpoint = strategy.checkpoint(folder, model=model, optimizer=optimizer)
        found[RESUME] = beyond(checkpoint.resume, state)
        ranks = strategy.all_gather_object(found)
    if not strategy.is_main:
        return None
    return {name: max((one[name] for one in ranks), key=lambda one: one["beyond"]) for name in found}


def measure(short: bool) -> Found:
    width = SHORT_WIDTH if short else WIDTH
    worlds: list[tuple[Any, Any]] = []
    for world in startable(GLOO) if short else startable(GLOO, HOROVOD_GLOO, HOROVOD_MPI):
        with tempfile.TemporaryDirectory() as folder:
            in_processes(world, save, width=width, folder=folder)
            worlds.append((world, in_processes(world, use, width=width, folder=folder)))
    return {"model_mb": LAYERS * width * width * 4 / MB, "worlds": worlds}


def tables(found: Found) -> str:
    rows = [
        [
            world_name(world), name, f"{one['final']:.0f}", f"{one['peak']:.0f}", f"{one['beyond']:+.0f}",
            f"{one['beyond'] / found['model_mb']:+.2f}",
        ]
        for world, ways in found["worlds"] for name, one in ways.items()
    ]  # fmt: skip
    head = ["world", "call", "final state, MB", "peak, MB", "beyond, MB", "beyond / model"]
    most = max(one["beyond"] for _, ways in found["worlds"] for one in ways.values())
    kept = "kept" if most <= ALLOWED_MB else "NOT KEPT"
    return (
        f"{table(head, rows)}\nThe model has {found['model_mb']:.0f} MB. A call may take {ALLOWED_MB} MB beyond the "
        f"final state on the rank where it takes the most: {kept} ({most:.0f} MB)."
    )


def plot(found: Found, figure: Figure) -> None:
    axis = figure.subplots()
    bars = [(f"{name}\n{world_name(world)}", one) for world, ways in found["worlds"] for name, one in ways.items()]
    axis.barh([name for name, _ in bars], [one["peak"] for _, one in bars], label="peak")
    axis.barh([name for name, _ in bars], [one["final"] for _, one in bars], label="final state")
    axis.invert_yaxis()
    axis.set_xlabel("MB on the rank with the highest peak beyond the final state")
    axis.legend()
    figure.set_size_inches(9, 4)


if __name__ == "__main__":
    run(measure, tables, plot)
